"""Convert GGUF's blocks to the tensors of frozen.Quantized and back, for reading.py and writing.py.

Most types stay as they lie: operators read their blocks. MXFP4 and NVFP4 have operators for other layouts, so codes and
scales are taken apart, and the codes reordered: a block of GGUF has the first half of the values in low nibbles and the
second half in high nibbles, where the operators have neighbours in a byte. GGUF's tables have twice the values and half
the scales of the formats with these names, so the products are the same.
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
    """Rearrange bytes [..., 2n] to bytes of two neighbours: first the low nibbles in pairs, then the high ones."""
    # two bytes as a 16-bit number: nibbles l0 h0 l1 h1 from the lowest -> bytes (l0, l1) and (h0, h1)
    pairs = halves.contiguous().view(torch.int16)
    low, high = pairs & 15 | pairs >> 4 & 240, pairs >> 4 & 15 | pairs >> 8 & 240
    return torch.cat((low, high), -1).to(torch.uint8)


def _nvfp4_scale(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.unflatten(-1, (-1, 36))[..., :4].flatten(1) & 127  # without a sign
    return torch.where(scale == 127, 0, scale)  # 127 is E4M3's NaN, but 0 in a file


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
    """Make NVFP4's `zero` [rows, 2], a factor and a divisor of 1 for each row, from a factor of one element."""
    return torch.stack((factor.flatten(), torch.ones(1, device=factor.device)), -1).expand(rows, 2)


def packed(kind: str, rows: torch.Tensor, factor: torch.Tensor | None) -> frozen.Quantized:
    """Make a weight of one expert from a matrix of blocks, uint8 [rows, bytes]. factor: NVFP4's; None for 1."""
    tensors = {name: piece(rows)[None].contiguous() for name, piece in PIECES[kind].items()}
    if kind == SCALED:
        factor = torch.ones(1, device=rows.device) if factor is None else factor
        tensors["zero"] = factors(factor, len(rows))[None].contiguous()
    return frozen.Quantized(kind, tensors["data"], tensors.get("scale"), tensors.get("zero"))


def rows_of(weight: frozen.Quantized) -> torch.Tensor:
    """Undo packed(), for any number of experts -> rows of blocks, uint8 [E, out, bytes].

    NVFP4's factors are not in the rows: a file has them in a tensor of their own.
    """
    if weight.scale is None:
        return weight.data
    scale = weight.scale.view(torch.uint8)
    # a block in the file has 4 scales and 4 * 16 values (NVFP4), or one scale and 32 values (MXFP4)
    scale = scale.unflatten(-1, (-1, 4 if weight.format == SCALED else 1))
    halves = nibbles(weight.data.flatten(2)).unflatten(-1, (*scale.shape[2:], 2, -1))
    data = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(3)
    return torch.cat((scale, data), -1).flatten(2)
