"""The qweight of GPTQ and AWQ: int4 once data, scales and zero points are turned."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import Matrix, Piece, Turn, check_groups, expect, stored, transposed
from fmoe_ext.checkpoint.model_folder import FLOATS, Base

QWEIGHT = MappingProxyType({"data": ".qweight", "scale": ".scales", "zero": ".qzeros"})


def turned_qweight(
    base: Base, stem: str, rows: int, columns: int, words: Callable[..., Any], zeros: Callable[..., Any]
) -> Matrix:
    """The matrix of a qweight: int4 once data, scale and zero are turned."""
    names = {part: stem + suffix for part, suffix in QWEIGHT.items()}
    (groups, _), of_scale = stored(base, names["scale"])
    check_groups(base, names["scale"], columns, groups)
    if rows % 8 or columns % 8:
        raise CheckpointError(
            f"{base.folder}: {names['data']} is of {rows} x {columns}, which are no whole words"
        )
    expect(base, names["data"], base.tensors[names["data"]].shape, (torch.int32,))
    expect(base, names["scale"], (groups, rows), (torch.float16, *FLOATS))
    expect(base, names["zero"], (groups, rows // 8), (torch.int32,))
    shapes = {"data": (rows, columns // 8), "scale": (rows, groups), "zero": (rows // 8, groups)}
    dtypes = {"data": torch.int32, "scale": of_scale, "zero": torch.int32}
    turns = {"data": words, "scale": transposed, "zero": zeros}
    pieces = {
        part: Piece(
            name,
            shapes[part],
            dtypes[part],
            Turn(turns[part], base.tensors[name].shape, f"u{dtypes[part].itemsize}"),
        )
        for part, name in names.items()
    }
    return Matrix("int4", (rows, columns), pieces)
