"""Quantization methods of published folders, a file each: names in the files, settings, and the matrix of a layer.

Activations that a setting would round are not rounded here: scales of inputs and of the cache are left alone. A layout
that no operator decodes as it lies is turned into one that an operator does, with the same values.
"""

from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.awq import AWQ
from fmoe_ext.checkpoint.methods.base import USUAL, Kind, Matrix, PackedTensor, is_usual, refuse
from fmoe_ext.checkpoint.methods.bitsandbytes import BITSANDBYTES
from fmoe_ext.checkpoint.methods.compressed_tensors import COMPRESSED_TENSORS
from fmoe_ext.checkpoint.methods.fp8 import FP8
from fmoe_ext.checkpoint.methods.gptq import GPTQ
from fmoe_ext.checkpoint.model_folder import Base

KINDS = MappingProxyType(
    {
        "fp8": FP8,
        "compressed-tensors": COMPRESSED_TENSORS,
        "gptq": GPTQ,
        "awq": AWQ,
        "bitsandbytes": BITSANDBYTES,
    }
)

__all__ = ["KINDS", "Kind", "Matrix", "PackedTensor", "kind_of"]


def kind_of(base: Base) -> Kind | None:
    """The kind that quantization_config names, None for others; CheckpointError for settings that are not computed."""
    config = base.config.get("quantization_config") or {}
    try:
        kind = KINDS.get(config.get("quant_method", ""))
        if kind is not None:
            kind.check(str(base.folder), config)
            unknown = (f"{key} {value!r}" for key, value in config.items() if not _is_known(kind, key, value))
            for what in (*unknown, *kind.refusals(config)):
                refuse(base.folder, f"quantization_config with {what}")
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{base.folder}: quantization_config is damaged: {error}") from error
    return kind


def _is_known(kind: Kind, key: str, value: object) -> bool:
    if key == "fmt":
        return value in USUAL["fmt"]
    return key in kind.known.split() or key == "quant_method" or is_usual(key, value)
