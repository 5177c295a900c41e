"""Quantization methods of published folders, a file each: names in the files, and the matrix of a layer.

Activations that a setting would round are not rounded here: scales of inputs and of the cache are left alone. A layout
that no operator decodes as it lies is turned into one that an operator does, with the same values, or decoded.
"""

from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.awq import AWQ
from fmoe_ext.checkpoint.methods.base import USUAL, Kind, Matrix, PackedTensor, is_usual, refuse
from fmoe_ext.checkpoint.methods.bitsandbytes import BITSANDBYTES
from fmoe_ext.checkpoint.methods.compressed_tensors import COMPRESSED_TENSORS
from fmoe_ext.checkpoint.methods.decoded import Decoded, decoded, plain
from fmoe_ext.checkpoint.methods.fp8 import DEEPSEEK_V4, FP8
from fmoe_ext.checkpoint.methods.gptq import GPTQ
from fmoe_ext.checkpoint.methods.modelopt import MODELOPT
from fmoe_ext.checkpoint.model_folder import ModelFolder

KINDS = MappingProxyType(
    {
        "fp8": FP8,
        "mxfp8": FP8,
        "compressed-tensors": COMPRESSED_TENSORS,
        "modelopt": MODELOPT,
        "gptq": GPTQ,
        "awq": AWQ,
        "bitsandbytes": BITSANDBYTES,
    }
)
MXFP4 = "mxfp4"  # of GPT-OSS, whose tensors are stacks: checkpoint.packed

__all__ = [
    "KINDS",
    "Decoded",
    "Kind",
    "Matrix",
    "PackedTensor",
    "decoded",
    "kind_of",
    "plain",
]


def kind_of(base: ModelFolder) -> Kind | None:
    """The kind that quantization_config names, None for plain weights and for MXFP4.

    Raises CheckpointError, by name, for methods that are not read and for settings that are not computed.
    """
    config = base.quantization
    try:
        method = config.get("quant_method", "")
        kind = KINDS.get(method)
        if kind is None:
            if method and method != MXFP4:
                algorithm = config.get("quant_algo") or config.get("format") or config.get("quant_type")
                refuse(base.folder, f"packed by {method}{f' ({algorithm})' if algorithm else ''}")
            return None
        kind.check(str(base.folder), config)
        unknown = (f"{key} {value!r}" for key, value in config.items() if not _is_known(kind, key, value))
        for what in (*unknown, *kind.refusals(config)):
            refuse(base.folder, f"quantization_config with {what}")
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{base.folder}: quantization_config is damaged: {error}") from error
    if kind is FP8 and _names_scales_as_deepseek_v4(base):
        return DEEPSEEK_V4
    return kind


def _names_scales_as_deepseek_v4(base: ModelFolder) -> bool:
    if any(name.endswith(FP8.scale) for name in base.tensors):
        return False
    return any(
        name.endswith(DEEPSEEK_V4.scale) and f"{name.removesuffix('.scale')}.weight" in base.tensors
        for name in base.tensors
    )


def _is_known(kind: Kind, key: str, value: object) -> bool:
    if key == "fmt":
        return value in USUAL["fmt"]
    return key in kind.known.split() or key == "quant_method" or is_usual(key, value)
