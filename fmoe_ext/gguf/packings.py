"""Blocks of GGUF as tensors of frozen.Quantized: as they lie, or with codes and scales apart.

In a block of MXFP4 and NVFP4 the low nibbles are the first half of the values, the high nibbles the second. Their
tables have twice the values and half the scales of the formats with these names, so the products are the same.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from fmoe_ext import frozen
from fmoe_ext.frozen.formats import GGUF
from fmoe_ext.frozen.formats.base import nibbles

Piece: TypeAlias = Callable[[torch.Tensor], torch.Tensor]  # uint8 [rows, bytes] -> [rows, *]


def _in_turn(halves: torch.Tensor) -> torch.Tensor:
    """Rearrange bytes [..., 2n], low nibbles first, -> [..., 2n] of neighbours, the low nibble first."""
    pairs = halves.contiguous().view(torch.int16)
    low, high = pairs & 15 | pairs >> 4 & 240, pairs >> 4 & 15 | pairs >> 8 & 240
    return torch.cat((low, high), -1).to(torch.uint8)


def _nvfp4_scale(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.unflatten(-1, (-1, 36))[..., :4].flatten(1) & 127  # without a sign
    return torch.where(scale == 127, 0, scale)  # which E4M3 has for NaN


# {type of GGUF, a name in frozen.FORMATS: {tensor of Quantized: piece}}
PIECES: Mapping[str, Mapping[str, Piece]] = MappingProxyType(
    {
        **{name: {"data": lambda rows: rows} for name in GGUF},
        "mxfp4": {  # blocks of 1 byte of scale and 16 bytes of 32 values
            "data": lambda rows: _in_turn(rows.unflatten(-1, (-1, 17))[..., 1:]),
            "scale": lambda rows: rows.unflatten(-1, (-1, 17))[..., 0],
        },
        "nvfp4": {  # blocks of 4 bytes of scales and 32 bytes of 4 * 16 values
            "data": lambda rows: _in_turn(
                rows.unflatten(-1, (-1, 36))[..., 4:].unflatten(-1, (4, 8))
            ).flatten(1),
            "scale": _nvfp4_scale,
        },
    }
)
SCALED = "nvfp4"  # the type whose tensors may have a factor each, or one for each expert


def factors(factor: torch.Tensor, rows: int) -> torch.Tensor:
    """Make the `zero` [rows, 2] of NVFP4 with a factor, float32 of one element."""
    return torch.stack((factor.flatten(), torch.ones(1, device=factor.device)), -1).expand(rows, 2)


def packed(kind: str, rows: torch.Tensor, factor: torch.Tensor | None) -> frozen.Quantized:
    """Make a matrix uint8 [rows, bytes] a weight of one expert. factor: of NVFP4, 1 if None."""
    tensors = {name: piece(rows)[None].contiguous() for name, piece in PIECES[kind].items()}
    if kind == SCALED:
        factor = torch.ones(1, device=rows.device) if factor is None else factor
        tensors["zero"] = factors(factor, len(rows))[None].contiguous()
    return frozen.Quantized(kind, tensors["data"], tensors.get("scale"), tensors.get("zero"))


def rows_of(weight: frozen.Quantized) -> torch.Tensor:
    """Make a weight of `packed()`, of any number of experts, rows uint8 [E, out, bytes] of a file again.

    Factors of NVFP4 are not in the rows: a file has them in a tensor of their own.
    """
    if weight.scale is None:
        return weight.data
    scale = weight.scale.view(torch.uint8)
    # blocks of a file: 4 scales and 4 * 16 values of NVFP4, one scale and 32 values of MXFP4
    scale = scale.unflatten(-1, (-1, 4 if weight.format == SCALED else 1))
    halves = nibbles(weight.data.flatten(2)).unflatten(-1, (*scale.shape[2:], 2, -1))
    data = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(3)
    return torch.cat((scale, data), -1).flatten(2)
