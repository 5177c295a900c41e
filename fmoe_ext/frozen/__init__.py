"""Products with frozen weights, packed ones among them, and low-rank adapters beside them.

    formats/, quantized.py   packed formats, and a weight of all experts in one of them
    frozen_gemm.py           a product with a packed weight
    frozen_mlp.py            the two layers of experts with adapters, of streamed weights too
    kept.py                  decoded copies that wait for the backward, on CUDA
    rounding.py              rounds a packed weight with an adapter to its format again

lora.fuse(), stream() and `fmoe adapter merge` compute with them.
"""

from fmoe_ext.frozen.formats import FORMATS
from fmoe_ext.frozen.formats.nf4 import nf4_scales
from fmoe_ext.frozen.frozen_gemm import frozen_gemm, frozen_gemm_ref
from fmoe_ext.frozen.frozen_mlp import frozen_mlp, frozen_mlp_ref
from fmoe_ext.frozen.kept import keep_decoded
from fmoe_ext.frozen.quantized import Quantized, quantize

__all__ = [
    "FORMATS",
    "Quantized",
    "frozen_gemm",
    "frozen_gemm_ref",
    "frozen_mlp",
    "frozen_mlp_ref",
    "keep_decoded",
    "nf4_scales",
    "quantize",
]
