"""Linear layers outside of the experts in packed formats: decoded when they are read."""

import re
from collections.abc import Container, Iterator, Mapping

import torch

from fmoe_ext import ops
from fmoe_ext.checkpoint.adapters.base import FLOATS, Base
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

# tensors that quantised folders have beside the weights, and that these do not need
BESIDE = re.compile(
    r".*\.(weight_scale_inv|weight_shape|weight_scale|weight_zero_point|[kv]_scale|input_scale)"
)
FP8_BLOCK = 128
INTEGERS = (torch.int64, torch.int32, torch.bool)  # of buffers


def outside_experts(
    base: Base, used: Container[str], dtype: torch.dtype
) -> Iterator[tuple[str, StoredTensor]]:
    """(name, tensor) of what is left of a folder beside `used`; packed weights decoded to dtype.

    FP8 with blocks of 128 x 128 (weight_scale_inv) and compressed-tensors' int4 (weight_packed) are decoded.
    Raises CheckpointError for others.
    """
    for name, tensor in base.tensors.items():
        if name in used:
            continue
        if tensor.dtype == torch.float8_e4m3fn and f"{name}_scale_inv" in base.tensors:
            yield name, _fp8(base, name, tensor, dtype)
        elif name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            yield stem, _int4(base, stem, tensor, dtype)
        elif BESIDE.fullmatch(name):
            continue
        elif tensor.dtype in FLOATS or (tensor.dtype in INTEGERS and ".weight" not in name):
            yield name, tensor
        else:
            raise CheckpointError(
                f"{base.folder}: {name} is {tensor.dtype}, packed in a format that is not decoded here: dequantise the "
                "model to bfloat16 first"
            )


def _fp8(base: Base, name: str, tensor: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    scale = base.tensors[f"{name}_scale_inv"]
    blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
    if len(tensor.shape) != 2 or scale.shape != blocks:
        raise CheckpointError(
            f"{base.folder}: {name}_scale_inv {list(scale.shape)} does not fit {list(tensor.shape)}: expected "
            f"{list(blocks)}, blocks of {FP8_BLOCK} x {FP8_BLOCK}"
        )
    return _decoded(tensor.shape, dtype, {"format": "fp8_block", "data": tensor, "scale": scale})


def _int4(base: Base, stem: str, packed: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    scale = base.tensors.get(f"{stem}_scale")
    if scale is None:
        raise CheckpointError(f"{base.folder} lacks {stem}_scale")
    if len(packed.shape) != 2 or packed.dtype != torch.int32:
        raise CheckpointError(f"{base.folder}: {stem}_packed is {packed.dtype} {list(packed.shape)}")
    parts: dict[str, StoredTensor | str] = {"format": "int4", "data": packed, "scale": scale}
    if f"{stem}_zero_point" in base.tensors:
        parts["zero"] = base.tensors[f"{stem}_zero_point"]
    return _decoded((packed.shape[0], packed.shape[1] * 8), dtype, parts)


def _decoded(
    shape: tuple[int, ...], dtype: torch.dtype, parts: Mapping[str, StoredTensor | str]
) -> StoredTensor:
    def read() -> torch.Tensor:
        values = {k: v if isinstance(v, str) else v.read()[None] for k, v in parts.items()}
        return ops.Quantized(**values).dequantize(dtype)[0]  # type: ignore[arg-type]

    return StoredTensor(shape, dtype, read)
