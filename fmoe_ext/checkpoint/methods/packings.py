"""Name the tensors of a packed linear layer, and make the quantization_config of its folder, for formats/quantized.py.

The other modules of this folder read published packings; they find the same values in what is written so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmoe_ext.checkpoint.methods.base import NVFP4_BLOCK
from fmoe_ext.checkpoint.methods.fp8 import FP8_BLOCK, MX_BLOCK
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.formats.nf4 import NF4_CODE


class Packing(NamedTuple):
    """Names and settings under which a folder has weights of one format."""

    format: str  # a name in frozen.FORMATS
    # packed weight [1, out, in] -> {ending of the tensor's name: tensor}
    tensors: Callable[[Quantized], dict[str, torch.Tensor]]
    config: Mapping[str, Any]  # quantization_config without the names of layers that stay as they are
    ignored: str  # the key for these names
    fused: bool = False  # layers that a server joins must share a factor: it keeps one for all

    def quantization_config(self, plain: Iterable[str]) -> dict[str, Any]:
        """Make a folder's quantization_config. plain: names of the linear layers that are not packed."""
        return {**self.config, self.ignored: sorted(set(plain))}


# quantization_config of compressed-tensors, whose one group has all linear layers
def _compressed(format: str, **weights: Any) -> dict[str, Any]:
    kind = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": kind, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": format}},
        "kv_cache_scheme": None,
    }


def _mxfp4(packed: Quantized) -> dict[str, torch.Tensor]:
    return {"weight_packed": packed.data[0].flatten(1), "weight_scale": _scale(packed)[0]}


def _nvfp4(packed: Quantized) -> dict[str, torch.Tensor]:
    assert packed.zero is not None
    # [factor, divisor], the same for every row
    factors = packed.zero[0, 0]
    whole = (factors[1] / factors[0])[None]  # compressed-tensors divides by it
    return {
        "weight_packed": packed.data[0],
        "weight_scale": _scale(packed)[0],
        "weight_global_scale": whole,
    }


def _with_inverse(packed: Quantized) -> dict[str, torch.Tensor]:
    return {"weight": packed.data[0], "weight_scale_inv": _scale(packed)[0]}


def _nf4(packed: Quantized) -> dict[str, torch.Tensor]:
    shape = list(packed.shape[1:])
    # quant_state: JSON in a tensor of bytes, which says what the flat weight is
    state = {"quant_type": "nf4", "blocksize": packed.kind.block, "dtype": "bfloat16", "shape": shape}
    text = bytearray(json.dumps(state).encode())
    return {
        "weight": packed.data.reshape(-1, 1),
        "weight.absmax": _scale(packed).flatten(),
        "weight.quant_map": torch.tensor(NF4_CODE, device="cpu"),
        "weight.quant_state.bitsandbytes__nf4": torch.frombuffer(text, dtype=torch.uint8),
    }


def _scale(packed: Quantized) -> torch.Tensor:
    assert packed.scale is not None  # as of all these formats
    return packed.scale


_MXFP4 = MappingProxyType(
    _compressed("mxfp4-pack-quantized", strategy="group", group_size=MX_BLOCK, scale_dtype="torch.uint8")
)
_NVFP4 = MappingProxyType(
    _compressed(
        "nvfp4-pack-quantized",
        strategy="tensor_group",
        group_size=NVFP4_BLOCK,
        scale_dtype="torch.float8_e4m3fn",
    )
)
_MXFP8 = MappingProxyType(
    {"quant_method": "mxfp8", "weight_block_size": [1, MX_BLOCK], "activation_scheme": "dynamic"}
)
_FP8 = MappingProxyType(
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "activation_scheme": "dynamic",
    }
)
_NF4 = MappingProxyType(
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
)
PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "mxfp4": Packing("mxfp4", _mxfp4, _MXFP4, "ignore"),
        "nvfp4": Packing("nvfp4", _nvfp4, _NVFP4, "ignore", fused=True),
        "mxfp8": Packing("mxfp8", _with_inverse, _MXFP8, "modules_to_not_convert"),
        "fp8": Packing("fp8_block", _with_inverse, _FP8, "modules_to_not_convert"),
        "nf4": Packing("nf4", _nf4, _NF4, "llm_int8_skip_modules"),
    }
)
