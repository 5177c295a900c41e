"""Linear layers outside of the experts in packed formats: read as they are, or decoded."""

from collections.abc import Container, Iterator

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods import Decoded, Matrix, PackedTensor, kind_of
from fmoe_ext.checkpoint.model_folder import FLOATS, Base
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

INTEGERS = (torch.int64, torch.int32, torch.bool)  # of buffers


def outside_experts(
    base: Base, used: Container[str], dtype: torch.dtype
) -> Iterator[tuple[str, StoredTensor]]:
    """(name, tensor) of what is left of a folder beside `used`; packed weights are read decoded to dtype.

    Those of methods.KINDS whose rows are packed one by one are a PackedTensor. Raises CheckpointError for
    formats that are not decoded.
    """
    kind = kind_of(base)
    for name, tensor in base.tensors.items():
        if name in used:
            continue
        stem = None if kind is None else kind.stem_of(name)
        if kind is not None and stem is not None and kind.has(base, stem):
            yield kind.plain_name(name), _decoded(base, kind.matrix(base, stem), dtype)
        elif kind is not None and kind.is_beside(name):
            continue
        elif tensor.dtype in FLOATS or (tensor.dtype in INTEGERS and ".weight" not in name):
            yield name, tensor
        else:
            raise CheckpointError(
                f"{base.folder}: {name} is {tensor.dtype}, packed in a format that is not decoded here: dequantise the "
                "model to bfloat16 first"
            )


def _decoded(base: Base, matrix: Matrix | Decoded, dtype: torch.dtype) -> StoredTensor:
    tensors = base.tensors  # of now: checkpoint.packed.decode() gives the base others
    if isinstance(matrix, Matrix) and matrix.has_rows:
        return PackedTensor(matrix.shape, dtype, lambda: matrix.packed(tensors))
    return StoredTensor(matrix.shape, dtype, lambda: matrix.decode(tensors, dtype))
