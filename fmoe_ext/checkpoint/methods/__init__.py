"""Read packed weights of published folders by their quantization method; kind_of(folder) finds it.

base.py explains what a method is; packings.py writes packed weights. Readers ask kind_of() once for a folder, and
expert_layers.py asks the method for each matrix. Only weights are read as packed: rounding of activations or of the
cache, which some settings ask for, is not computed, and its scales are ignored. A layout that no operator takes is
rearranged into one that an operator takes, with the same values, or decoded.
"""

from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import USUAL, Decoded, Kind, Matrix, PackedTensor, is_usual, refuse
from fmoe_ext.checkpoint.methods.bitsandbytes import Bitsandbytes
from fmoe_ext.checkpoint.methods.compressed_tensors import CompressedTensors
from fmoe_ext.checkpoint.methods.fp8 import DeepseekV4, Fp8
from fmoe_ext.checkpoint.methods.gptq import Awq, Gptq
from fmoe_ext.checkpoint.methods.modelopt import Modelopt
from fmoe_ext.checkpoint.model_folder import ModelFolder

__all__ = ["KINDS", "Decoded", "Kind", "Matrix", "PackedTensor", "kind_of"]

# {quant_method of quantization_config: Kind}
KINDS = MappingProxyType(
    {
        "fp8": Fp8(),
        "mxfp8": Fp8(),
        "compressed-tensors": CompressedTensors(),
        "modelopt": Modelopt(),
        "gptq": Gptq(),
        "awq": Awq(),
        "bitsandbytes": Bitsandbytes(),
    }
)
_MXFP4 = "mxfp4"  # GPT-OSS's, whose tensors are stacks: expert_layers.py reads it


def kind_of(base: ModelFolder) -> Kind | None:
    """Return the method that quantization_config names; None for plain weights and for MXFP4.

    Raises CheckpointError, by name, for methods that are not read and for settings that are not computed.
    """
    config = base.quantization
    try:
        method = config.get("quant_method", "")
        kind = KINDS.get(method)
        if kind is None:
            if method and method != _MXFP4:
                algorithm = config.get("quant_algo") or config.get("format") or config.get("quant_type")
                refuse(base.folder, f"packed by {method}{f' ({algorithm})' if algorithm else ''}")
            return None
        kind.check(str(base.folder), config)
        known = {*kind.known.split(), "quant_method"}
        for key, value in config.items():
            is_as_computed = value in USUAL["fmt"] if key == "fmt" else key in known or is_usual(key, value)
            if not is_as_computed:
                refuse(base.folder, f"quantization_config with {key} {value!r}")
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{base.folder}: quantization_config is damaged: {error}") from error
    # DeepSeek-V4 says "fp8" too: the names of its scales tell it apart
    if isinstance(kind, Fp8) and not any(name.endswith(kind.scale) for name in base.tensors):
        for name in base.tensors:
            stem = name.removesuffix(DeepseekV4.scale)
            if stem != name and f"{stem}.weight" in base.tensors:
                return DeepseekV4()
    return kind
