"""Four bits in groups of 32 columns or a multiple, as compressed-tensors has them; GPTQ and AWQ become this.

    value = scale * (code - zero)      code: 4 bits, eight columns an int32, the lowest bits first

code and zero are 0 to 15 as stored, 8 more than the signed -8 to 7; without zero points zero is 8. Zero points are
packed along the rows: the int32 [r, g] has the zero points of rows 8r to 8r + 7 for group g.
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import (
    FLOATS,
    Grid,
    Lattice,
    Packed,
    Shape,
    Tensors,
    pairs,
    require,
    same_shape,
)


class Int4(Lattice):
    """Integers of 4 bits with scales and, if they are not symmetric, zero points of groups of columns."""

    number = 3
    tensors = (
        "data int32 [E, out, in / 8], scale [E, out, groups], zero int32 [E, ceil(out / 8), groups] or None"
    )
    bits = 4.5
    block = 32

    def check(self, q: Packed) -> Shape:
        data, scale = require(q, "data", (torch.int32,), 3), require(q, "scale", FLOATS, 3)
        E, out, words = data.shape
        groups = scale.shape[2]
        same_shape(q, "scale", scale, (E, out, groups))
        if groups == 0 or words * 8 % groups or words * 8 // groups % 32:
            raise ValueError(
                f"groups of int4 must be whole multiples of 32 columns, but got {groups} groups of {words * 8} columns"
            )
        if q.zero is not None:
            zero = require(q, "zero", (torch.int32,), 3)
            same_shape(q, "zero", zero, (E, -(-out // 8), groups))
        return E, out, words * 8

    def decode(self, q: Packed) -> torch.Tensor:
        assert q.scale is not None
        values = _codes(q.data).unflatten(-1, (q.scale.shape[2], -1))  # [E, out, groups, columns of a group]
        return ((values - _zeros(q)).float() * q.scale.float()[..., None]).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        groups = weight.unflatten(2, (-1, 32))
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()  # between 7 and 8, the largest codes of each sign
        divisor = torch.where(scale > 0, scale, 1).float()[..., None]
        codes = ((groups / divisor).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(2)
        return pairs(codes).view(torch.int32), scale

    def of_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.int32)

    def grid(self, q: Packed) -> Grid:
        assert q.scale is not None
        codes = torch.arange(16, dtype=torch.uint8, device=q.device)
        step = q.scale.float()
        return Grid(codes.float(), codes, step, (step[..., None] * _zeros(q)).flatten(-2))

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        return pairs(codes).view(torch.int32)

    def rescale(self, q: Packed, factor: torch.Tensor) -> Tensors:
        assert q.scale is not None
        return q.data, (q.scale.float() * factor).to(q.scale.dtype)


def _codes(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [..., n] -> [..., 8n] of 4 bits, the lowest first."""
    shifts = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def _zeros(q: Packed) -> torch.Tensor | int:
    """Unpack the zero points, [E, out, groups, 1], or one number for all."""
    # the last int32 of a column may have more rows than the weight
    return 8 if q.zero is None else _codes(q.zero.mT).mT[:, : q.data.shape[1], :, None]
