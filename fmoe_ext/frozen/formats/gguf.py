"""GGUF's formats: a row is whole blocks of columns, one after the other, each with its scales in its bytes.

Bytes of a block in their order, as ggml-common.h has them; d and dmin are float16, codes are packed lowest bits first:

    q8_0    32 columns   d 2, codes 32 (int8)                          d * code
    q4_0    32           d 2, codes 16                                 d * (code - 8)
    iq4_nl  32           d 2, codes 16                                 d * CODES[code]
    q4_k    256          d 2, dmin 2, scales 12, codes 128             d * scale * code - dmin * minimum
    q5_k    256          d 2, dmin 2, scales 12, fifth bits 32, codes 128     the same
    q6_k    256          low bits 128, high bits 64, scales 16 (int8), d 2    d * scale * (code - 32)
    iq4_xs  256          d 2, high scales 2, low scales 4, codes 128          d * (scale - 32) * CODES[code]

A scale of a block of 256 is for 32 columns (16 in q6_k). q4_k and q5_k pack eight scales and eight minima of 6 bits
into 12 bytes (_KBlocks). The two columns of a byte of codes are half a group apart, not neighbours: i and i + 16 of 32;
in q4_k and q5_k i and i + 32 of 64; in q6_k i and i + 64 of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from fmoe_ext.frozen.formats.base import (
    FACTORS,
    Fitted,
    Format,
    Grid,
    Lattice,
    Packed,
    Shape,
    Tensors,
    nearest,
    refuse,
    require,
    table_of,
)

# What the codes of iq4_nl and iq4_xs stand for (llama.cpp's kvalues_iq4nl).
CODES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip


class _Blocks(Format):
    """A format whose rows are whole blocks of block_bytes bytes for `block` columns."""

    block_bytes: int

    def __init__(self) -> None:
        self.tensors = f"data uint8 [E, out, in / {self.block} * {self.block_bytes}]"
        self.bits = self.block_bytes * 8 / self.block

    def check(self, q: Packed) -> Shape:
        data = require(q, "data", (torch.uint8,), 3)
        refuse(q, "scale", "zero")
        E, out, row_bytes = data.shape
        if row_bytes % self.block_bytes:
            raise ValueError(
                f"a row of {q.format} must be whole blocks of {self.block_bytes} bytes, but got {row_bytes} bytes"
            )
        return E, out, row_bytes // self.block_bytes * self.block

    def blocks(self, q: Packed) -> torch.Tensor:
        """View data as uint8 [E, out, blocks of a row, block_bytes]."""
        return q.data.unflatten(-1, (-1, self.block_bytes))


class _Q8_0(_Blocks):
    number, block_bytes, block = 4, 34, 32
    has_integers = True

    def decode(self, q: Packed) -> torch.Tensor:
        blocks = self.blocks(q)
        return (_half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 32))
        scale = blocks.abs().amax(-1) / 127
        scaled = blocks * _inverse(scale)[..., None]
        codes = torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())  # half away from zero
        return torch.cat((_bytes_of_half(scale), codes.to(torch.int8).view(torch.uint8)), -1).flatten(2), None


class _Q4_0(_Blocks):
    number, block_bytes, block = 8, 18, 32

    def decode(self, q: Packed) -> torch.Tensor:
        blocks = self.blocks(q)
        return (_half(blocks[..., :2]) * (_nibbles_apart(blocks[..., 2:]).float() - 8)).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 32))
        scale = (
            blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
        )  # the largest becomes -8, exactly
        codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
        return torch.cat((_bytes_of_half(scale[..., 0]), _pairs_apart(codes)), -1).flatten(2), None


class _KBlocks(_Blocks):
    """Base of Q4_K and Q5_K: 16 bytes of scales at the start of a block of 256, the low 4 bits of its codes at its end.

    The 12 bytes of scales s and minima m, 6 bits each, behind d and dmin:

        bytes 0 to 3    s 0 to 3, above them the high 2 bits of s 4 to 7
        bytes 4 to 7    m 0 to 3, above them the high 2 bits of m 4 to 7
        bytes 8 to 11   the low 4 bits of s 4 to 7, above them those of m 4 to 7
    """

    block = 256

    def steps(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return d * scale and dmin * minimum, [..., 8]."""
        d, dmin, packed = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:16]
        low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
        minimum = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
        return d * scale, dmin * minimum

    def low_codes(self, blocks: torch.Tensor) -> torch.Tensor:
        """Unpack the last 128 bytes -> [..., 8, 32]."""
        pairs = blocks[..., -128:].unflatten(-1, (4, 1, 32))
        return torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3, -2)

    def packed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes [..., 8, 32] of 4 bits -> uint8 [..., 128]."""
        return (codes[..., ::2, :] | codes[..., 1::2, :] << 4).flatten(-2)

    def head_and_codes(
        self, blocks: torch.Tensor, most: int, importance: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round float32 [..., 8, 32] -> the first 16 bytes of each block, and codes [..., 8, 32] from 0 to most."""
        # 1. A line through the least and the largest value of 32, or one fitted by importance.
        minimum = -blocks.amin(-1).clamp(max=0)
        scale = (blocks.amax(-1) + minimum) / most
        if importance is not None:
            scale, minimum = _fitted_line(blocks, importance, scale, minimum, most)
        # 2. Scales and minima in 6 bits, up to 63. d is rounded to float16 first: scales and codes make up for that.
        d, dmin = (t.amax(-1, keepdim=True).div(63).half().float() for t in (scale, minimum))
        scales, minima = (
            (t * _inverse(unit)).round().clamp(0, 63) for t, unit in ((scale, d), (minimum, dmin))
        )
        # 3. Codes, by the scales as they are read.
        step, low = (d * scales)[..., None], (dmin * minima)[..., None]
        codes = ((blocks + low) * _inverse(step)).round().clamp(0, most).to(torch.uint8)
        # 4. The 12 bytes of the class's docstring.
        s, m = scales.to(torch.uint8), minima.to(torch.uint8)
        first = s[..., :4] | s[..., 4:] >> 4 << 6
        second = m[..., :4] | m[..., 4:] >> 4 << 6
        third = s[..., 4:] & 15 | (m[..., 4:] & 15) << 4
        units = _bytes_of_half(d[..., 0]), _bytes_of_half(dmin[..., 0])
        return torch.cat((*units, first, second, third), -1), codes


class _Q4K(_KBlocks, Lattice, Fitted):
    number, block_bytes = 5, 144
    has_integers = True

    def decode(self, q: Packed) -> torch.Tensor:
        blocks = self.blocks(q)
        step, low = self.steps(blocks)
        return (step[..., None] * self.low_codes(blocks) - low[..., None]).flatten(-3)

    def pack(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Tensors:
        blocks = weight.unflatten(2, (-1, 8, 32))
        head, codes = self.head_and_codes(blocks, 15)
        # scales and minima are rounded too, which may undo what was won in a block
        if importance is not None:
            w = importance.unflatten(2, (-1, 8, 32))
            other, other_codes = self.head_and_codes(blocks, 15, w)

            def error(head: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
                step, low = self.steps(head)
                return (w * (step[..., None] * codes - low[..., None] - blocks).square()).sum((-1, -2))

            is_better = error(other, other_codes) < error(head, codes)
            head = torch.where(is_better[..., None], other, head)
            codes = torch.where(is_better[..., None, None], other_codes, codes)
        return torch.cat((head, self.packed_codes(codes)), -1).flatten(2), None

    def grid(self, q: Packed) -> Grid:
        step, low = self.steps(self.blocks(q))
        codes = torch.arange(16, dtype=torch.uint8, device=q.device)
        return Grid(codes.float(), codes, step.flatten(-2), low.flatten(-2))

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        codes = self.packed_codes(codes.unflatten(-1, (-1, 8, 32)))
        return torch.cat((self.blocks(q)[..., :16], codes), -1).flatten(-2)

    def rescale(self, q: Packed, factor: torch.Tensor) -> Tensors:
        blocks = self.blocks(q)
        # one factor for all scales of a block, so d and dmin alone change
        units = [_bytes_of_half(_half(blocks[..., i : i + 2])[..., 0] * factor) for i in (0, 2)]
        return torch.cat((*units, blocks[..., 4:]), -1).flatten(-2), None


class _Q5K(_KBlocks):
    number, block_bytes = 9, 176

    def decode(self, q: Packed) -> torch.Tensor:
        blocks = self.blocks(q)
        step, low = self.steps(blocks)
        high = torch.stack([blocks[..., 16:48] >> shift & 1 for shift in range(8)], -2)  # [..., 8, 32]
        return (step[..., None] * (self.low_codes(blocks) | high << 4) - low[..., None]).flatten(-3)

    def pack(self, weight: torch.Tensor) -> Tensors:
        head, codes = self.head_and_codes(weight.unflatten(2, (-1, 8, 32)), 31)
        high = torch.zeros_like(codes[..., 0, :])
        for shift in range(8):
            high |= codes[..., shift, :] >> 4 << shift
        return torch.cat((head, high, self.packed_codes(codes & 15)), -1).flatten(2), None


class _Q6K(_Blocks):
    number, block_bytes, block = 6, 210, 256

    def decode(self, q: Packed) -> torch.Tensor:
        blocks = self.blocks(q)
        # halves of 128 columns: 64 bytes of low bits, 32 of high bits, of four quarters of 32 columns
        low, high = (
            blocks[..., :128].unflatten(-1, (2, 1, 64)),
            blocks[..., 128:192].unflatten(-1, (2, 1, 32)),
        )
        low = torch.cat((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 2, 4, 32]
        high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
        values = (low | high << 4).to(torch.int8) - 32
        scale = _half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
        return (scale[..., None] * values.flatten(-3).unflatten(-1, (16, 16))).flatten(-3)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 16, 16))
        # 31 and 127: the largest code, and the largest int8 of a scale
        scale = blocks.abs().amax(-1) / 31
        d = scale.amax(-1, keepdim=True).div(127).half().float()
        scales = (scale * _inverse(d)).round().clamp(0, 127)
        codes = (blocks * _inverse(d * scales)[..., None]).round().clamp(-32, 31) + 32
        quarters = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
        low = (quarters[..., :2, :] & 15 | (quarters[..., 2:, :] & 15) << 4).flatten(-3)
        high = quarters >> 4
        high = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
        tail = (scales.to(torch.int8).view(torch.uint8), _bytes_of_half(d[..., 0]))
        return torch.cat((low, high.flatten(-2), *tail), -1).flatten(2), None


class _Iq4Nl(_Blocks):
    number, block_bytes, block = 10, 18, 32

    def decode(self, q: Packed) -> torch.Tensor:
        blocks, table = self.blocks(q), table_of(CODES, q.device)
        return (_half(blocks[..., :2]) * table[_nibbles_apart(blocks[..., 2:]).int()]).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 32))
        scale = _signed_scale(blocks).half()
        codes = _nearest_codes(blocks * _inverse(scale.float())[..., None])
        return torch.cat((_bytes_of_half(scale), _pairs_apart(codes)), -1).flatten(2), None


class _Iq4Xs(_Blocks):
    number, block_bytes, block = 11, 136, 256

    def decode(self, q: Packed) -> torch.Tensor:
        blocks, table = self.blocks(q), table_of(CODES, q.device)
        # 4 low bits and 2 high ones of 8 scales
        low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
        high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
        scale = _half(blocks[..., :2]) * ((low | high << 4).float() - 32)
        values = table[_nibbles_apart(blocks[..., 8:].unflatten(-1, (8, 16))).int()]  # [..., 8, 32]
        return (scale[..., None] * values).flatten(-3)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 8, 32))
        scale = _signed_scale(blocks)
        # the scale of the largest magnitude becomes -32, exactly: 6 bits reach further below zero than above
        d = (scale.gather(-1, scale.abs().argmax(-1, keepdim=True)) / -32).half()
        scales = (scale * _inverse(d.float())).round().clamp(-32, 31)
        codes = _nearest_codes(blocks * _inverse(d.float() * scales)[..., None])
        s = (scales + 32).to(torch.uint8)
        low = s[..., ::2] & 15 | (s[..., 1::2] & 15) << 4
        high = (s >> 4).unflatten(-1, (2, 4))
        high = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
        head = (_bytes_of_half(d[..., 0]), high, low)
        return torch.cat((*head, _pairs_apart(codes).flatten(-2)), -1).flatten(2), None


GGUF: Mapping[str, Format] = MappingProxyType(
    {
        "q8_0": _Q8_0(),
        "q4_k": _Q4K(),
        "q6_k": _Q6K(),
        "q4_0": _Q4_0(),
        "q5_k": _Q5K(),
        "iq4_nl": _Iq4Nl(),
        "iq4_xs": _Iq4Xs(),
    }
)


def _half(data: torch.Tensor) -> torch.Tensor:
    """Read float16 from uint8 [..., 2] -> float32 [..., 1]."""
    return data.contiguous().view(torch.float16).float()


def _bytes_of_half(values: torch.Tensor) -> torch.Tensor:
    """Write [...] as float16 -> uint8 [..., 2]; ValueError for scales that float16 does not hold."""
    halves = values.half()
    if not halves.is_meta and not halves.isfinite().all():
        raise ValueError(
            f"the scale of a block is {values.abs().max().item():.3g}, and GGUF's formats keep scales in float16, up "
            "to 65504: the weight's values are too large for them"
        )
    return halves[..., None].view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, and 0 of 0."""
    return torch.where(scale == 0, 0, 1 / scale)


def _fitted_line(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose scale s and minimum m [..., 8] of x [..., 8, 32] with the least sum of w (s code - m - x)^2.

    A search over FACTORS times the scale: each gives codes, to which the best s and m are fitted: the line through the
    weighted points (code, x), whose slope is s and whose value at 0 is -m.
    """
    codes = ((x + minimum[..., None]) * _inverse(scale)[..., None]).round().clamp(0, most)
    least = (w * (scale[..., None] * codes - minimum[..., None] - x).square()).sum(-1)
    found = scale, minimum
    for factor in FACTORS:
        codes = ((x + minimum[..., None]) * _inverse(scale * factor)[..., None]).round().clamp(0, most)
        of, c, cc, of_x, xc = (t.sum(-1) for t in (w, w * codes, w * codes**2, w * x, w * x * codes))
        s = (of * xc - of_x * c) / (of * cc - c * c)
        m = (s * c - of_x) / of
        # a minimum below zero has no code: then the line through 0
        s, m = torch.where(m < 0, xc / cc, s), m.clamp(min=0)
        error = (w * (s[..., None] * codes - m[..., None] - x).square()).sum(-1)
        is_better = (error < least) & (s > 0)  # s is infinite or NaN where all codes are equal
        found = torch.where(is_better, s, found[0]), torch.where(is_better, m, found[1])
        least = torch.where(is_better, error, least)
    return found


def _nibbles_apart(data: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [..., 16] -> [..., 32] of 4 bits: the low ones, then the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _pairs_apart(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [..., 32] -> uint8 [..., 16]."""
    return codes[..., :16] | codes[..., 16:] << 4


def _nearest_codes(scaled: torch.Tensor) -> torch.Tensor:
    return nearest(scaled, torch.tensor(CODES, device=scaled.device))


def _signed_scale(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale [...], of either sign, with which the largest magnitude of a block [..., 32] is CODES[0]."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0] / CODES[0]
