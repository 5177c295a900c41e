"""GGUF's blocks: a row is bytes, whole blocks of columns one after the other that hold their scales.

Bytes of a block in their order, as ggml-common.h has them; d and dmin are float16, codes are packed lowest bits first:

    q8_0    32 columns   d 2, codes 32 (int8)                          d * code
    q4_0    32           d 2, codes 16                                 d * (code - 8)
    iq4_nl  32           d 2, codes 16                                 d * CODES[code]
    q4_k    256          d 2, dmin 2, scales 12, codes 128             d * scale * code - dmin * minimum
    q5_k    256          d 2, dmin 2, scales 12, fifth bits 32, codes 128     the same
    q6_k    256          low bits 128, high bits 64, scales 16 (int8), d 2    d * scale * (code - 32)
    iq4_xs  256          d 2, high scales 2, low scales 4, codes 128          d * (scale - 32) * CODES[code]

A scale of a block of 256 is for 32 columns (16 in q6_k). q4_k and q5_k pack eight scales and eight minima of 6 bits
into 12 bytes (_steps_k). The two columns of a byte of codes are half a group apart, not neighbours: i and i + 16 of 32;
in q4_k and q5_k i and i + 32 of 64; in q6_k i and i + 64 of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.frozen.formats.base import (
    FACTORS,
    Format,
    Grid,
    Packed,
    Shape,
    Tensors,
    nearest,
    refuse,
    require,
)

# What the codes of iq4_nl and iq4_xs stand for (llama.cpp's kvalues_iq4nl).
CODES = (
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0,
    1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
)  # fmt: skip


def _half(data: torch.Tensor) -> torch.Tensor:
    """Read float16 from uint8 [..., 2] -> float32 [..., 1]."""
    return data.contiguous().view(torch.float16).float()


def _bytes_of_half(values: torch.Tensor) -> torch.Tensor:
    """Write [...] as float16 -> uint8 [..., 2]."""
    return values.half()[..., None].view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale, and 0 of 0."""
    return torch.where(scale == 0, 0, 1 / scale)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [..., 16] -> [..., 32] of 4 bits: the low ones, then the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _pairs_of_halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes [..., 32] -> uint8 [..., 16]."""
    return codes[..., :16] | codes[..., 16:] << 4


def _decode_q8_0(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 34))
    return (_half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)


def _pack_q8_0(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = blocks.abs().amax(-1) / 127
    scaled = blocks * _inverse(scale)[..., None]
    codes = torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())  # half away from zero
    return torch.cat((_bytes_of_half(scale), codes.to(torch.int8).view(torch.uint8)), -1).flatten(2), None


def _decode_q4_0(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 18))
    return (_half(blocks[..., :2]) * (_halves(blocks[..., 2:]).float() - 8)).flatten(-2)


def _pack_q4_0(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8  # the largest becomes -8, exactly
    codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_bytes_of_half(scale[..., 0]), _pairs_of_halves(codes)), -1).flatten(2), None


def _steps_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return d * scale and dmin * minimum, [..., 8], of blocks [..., 16 or more] of Q4_K or Q5_K.

    The 12 bytes of scales, s and m of 6 bits each:

        bytes 0 to 3    s 0 to 3, above them the high 2 bits of s 4 to 7
        bytes 4 to 7    m 0 to 3, above them the high 2 bits of m 4 to 7
        bytes 8 to 11   the low 4 bits of s 4 to 7, above them those of m 4 to 7
    """
    d, dmin, packed = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return d * scale, dmin * minimum


def _decode_q4_k(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 144))
    step, low = _steps_k(blocks)
    pairs = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    values = torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3, -2)  # [..., 8, 32]
    return (step[..., None] * values - low[..., None]).flatten(-3)


def _grid_q4_k(q: Packed) -> Grid:
    step, low = _steps_k(q.data.unflatten(-1, (-1, 144)))
    codes = torch.arange(16, dtype=torch.uint8, device=q.device)
    return Grid(codes.float(), codes, step.flatten(-2), low.flatten(-2))


def _recode_q4_k(q: Packed, codes: torch.Tensor) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 144))
    return torch.cat((blocks[..., :16], _pairs_q4_k(codes.unflatten(-1, (-1, 8, 32)))), -1).flatten(-2)


def _pairs_q4_k(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [..., 8, 32] -> uint8 [..., 128]."""
    return (codes[..., ::2, :] | codes[..., 1::2, :] << 4).flatten(-2)


def _rescale_q4_k(q: Packed, factor: torch.Tensor) -> Tensors:
    blocks = q.data.unflatten(-1, (-1, 144))
    # d and dmin alone: all scales of a block change by one factor
    units = [_bytes_of_half(_half(blocks[..., i : i + 2])[..., 0] * factor) for i in (0, 2)]
    return torch.cat((*units, blocks[..., 4:]), -1).flatten(-2), None


def _head_k(
    blocks: torch.Tensor, most: int, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack float32 [..., 8, 32] -> the first 16 bytes of a block of Q4_K or Q5_K, and its codes from 0 to most."""
    minimum = -blocks.amin(-1).clamp(max=0)
    scale = (blocks.amax(-1) + minimum) / most
    if importance is not None:
        scale, minimum = _fitted_k(blocks, importance, scale, minimum, most)
    # 63, the largest of 6 bits; d as float16 has it, so that scales and codes make up for its rounding
    d, dmin = (t.amax(-1, keepdim=True).div(63).half().float() for t in (scale, minimum))
    scales, minima = ((t * _inverse(unit)).round().clamp(0, 63) for t, unit in ((scale, d), (minimum, dmin)))
    step, low = (d * scales)[..., None], (dmin * minima)[..., None]
    codes = ((blocks + low) * _inverse(step)).round().clamp(0, most).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[..., :4] | s[..., 4:] >> 4 << 6
    second = m[..., :4] | m[..., 4:] >> 4 << 6
    third = s[..., 4:] & 15 | (m[..., 4:] & 15) << 4
    return torch.cat(
        (_bytes_of_half(d[..., 0]), _bytes_of_half(dmin[..., 0]), first, second, third), -1
    ), codes


def _fitted_k(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose scale s and minimum m [..., 8] of x [..., 8, 32] with the least sum of w (s code - m - x)^2.

    Codes by each of some scales, then the s and m that are best for these codes: a line through weighted points.
    """
    codes = ((x + minimum[..., None]) * _inverse(scale)[..., None]).round().clamp(0, most)
    least = (w * (scale[..., None] * codes - minimum[..., None] - x).square()).sum(-1)
    found = scale, minimum
    for factor in FACTORS:
        codes = ((x + minimum[..., None]) * _inverse(scale * factor)[..., None]).round().clamp(0, most)
        of, c, cc, of_x, xc = (t.sum(-1) for t in (w, w * codes, w * codes**2, w * x, w * x * codes))
        s = (of * xc - of_x * c) / (of * cc - c * c)
        m = (s * c - of_x) / of
        s, m = torch.where(m < 0, xc / cc, s), m.clamp(min=0)  # a minimum below zero has no code
        error = (w * (s[..., None] * codes - m[..., None] - x).square()).sum(-1)
        is_better = (error < least) & (s > 0)  # of equal codes s is infinite or no number
        found = torch.where(is_better, s, found[0]), torch.where(is_better, m, found[1])
        least = torch.where(is_better, error, least)
    return found


def _pack_q4_k(weight: torch.Tensor, importance: torch.Tensor | None = None) -> Tensors:
    blocks = weight.unflatten(2, (-1, 8, 32))
    head, codes = _head_k(blocks, 15)
    if importance is not None:  # scales and minima are rounded too, which may undo what was won in a block
        w = importance.unflatten(2, (-1, 8, 32))
        other, other_codes = _head_k(blocks, 15, w)

        def error(head: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            step, low = _steps_k(head)
            return (w * (step[..., None] * codes - low[..., None] - blocks).square()).sum((-1, -2))

        is_better = error(other, other_codes) < error(head, codes)
        head = torch.where(is_better[..., None], other, head)
        codes = torch.where(is_better[..., None, None], other_codes, codes)
    return torch.cat((head, _pairs_q4_k(codes)), -1).flatten(2), None


def _decode_q5_k(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 176))
    step, low = _steps_k(blocks)
    pairs = blocks[..., 48:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3, -2)  # [..., 8, 32]
    high = torch.stack([blocks[..., 16:48] >> shift & 1 for shift in range(8)], -2)
    return (step[..., None] * (codes | high << 4) - low[..., None]).flatten(-3)


def _pack_q5_k(weight: torch.Tensor) -> Tensors:
    head, codes = _head_k(weight.unflatten(2, (-1, 8, 32)), 31)
    high = torch.zeros_like(codes[..., 0, :])
    for shift in range(8):
        high |= codes[..., shift, :] >> 4 << shift
    return torch.cat((head, high, _pairs_q4_k(codes & 15)), -1).flatten(2), None


def _decode_q6_k(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 210))
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 2, 4, 32]
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    values = (low | high << 4).to(torch.int8) - 32
    scale = _half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return (scale[..., None] * values.flatten(-3).unflatten(-1, (16, 16))).flatten(-3)


def _pack_q6_k(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 16, 16))
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


def _values(codes: torch.Tensor) -> torch.Tensor:
    # Filled on the device: torch.tensor would copy from the host, which CUDA graphs refuse.
    table = torch.stack([torch.full((), code, dtype=torch.float32, device=codes.device) for code in CODES])
    return table[codes.int()]


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    return nearest(scaled, torch.tensor(CODES, device=scaled.device))


def _decode_iq4_nl(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 18))
    return (_half(blocks[..., :2]) * _values(_halves(blocks[..., 2:]))).flatten(-2)


def _pack_iq4_nl(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = _signed_scale(blocks).half()
    codes = _codes(blocks * _inverse(scale.float())[..., None])
    return torch.cat((_bytes_of_half(scale), _pairs_of_halves(codes)), -1).flatten(2), None


def _signed_scale(blocks: torch.Tensor) -> torch.Tensor:
    """Return the scale [...] with which the largest magnitude of a block [..., 32] is the first of CODES."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0] / CODES[0]


def _decode_iq4_xs(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 136))
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    scale = _half(blocks[..., :2]) * (
        (low | high << 4).float() - 32
    )  # 4 low bits and 2 high ones of 8 scales
    values = _values(_halves(blocks[..., 8:].unflatten(-1, (8, 16))))
    return (scale[..., None] * values).flatten(-3)


def _pack_iq4_xs(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 8, 32))
    scale = _signed_scale(blocks)
    d = (scale.gather(-1, scale.abs().argmax(-1, keepdim=True)) / -32).half()
    scales = (scale * _inverse(d.float())).round().clamp(-32, 31)
    codes = _codes(blocks * _inverse(d.float() * scales)[..., None])
    s = (scales + 32).to(torch.uint8)
    low = s[..., ::2] & 15 | (s[..., 1::2] & 15) << 4
    high = (s >> 4).unflatten(-1, (2, 4))
    high = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    head = (_bytes_of_half(d[..., 0]), high, low)
    return torch.cat((*head, _pairs_of_halves(codes).flatten(-2)), -1).flatten(2), None


def _of_blocks(
    number: int,
    block_bytes: int,
    block: int,
    decode: Callable[[Packed], torch.Tensor],
    pack: Callable[[torch.Tensor], Tensors],
    **more: Any,
) -> Format:
    """Make the format whose rows are whole blocks of block_bytes bytes for `block` columns."""

    def check(q: Packed) -> Shape:
        data = require(q, "data", (torch.uint8,), 3)
        refuse(q, "scale", "zero")
        E, out, row_bytes = data.shape
        if row_bytes % block_bytes:
            raise ValueError(
                f"a row of {q.format} must be whole blocks of {block_bytes} bytes, but got {row_bytes} bytes"
            )
        return E, out, row_bytes // block_bytes * block

    tensors = f"data uint8 [E, out, in / {block} * {block_bytes}]"
    return Format(number, tensors, block_bytes * 8 / block, block, check, decode, pack, **more)


GGUF = MappingProxyType(
    {
        "q8_0": _of_blocks(4, 34, 32, _decode_q8_0, _pack_q8_0, has_integers=True),
        "q4_k": _of_blocks(
            5, 144, 256, _decode_q4_k, _pack_q4_k,
            is_fitted=True, has_integers=True, grid=_grid_q4_k, recode=_recode_q4_k, rescale=_rescale_q4_k,
        ),
        "q6_k": _of_blocks(6, 210, 256, _decode_q6_k, _pack_q6_k),
        "q4_0": _of_blocks(8, 18, 32, _decode_q4_0, _pack_q4_0),
        "q5_k": _of_blocks(9, 176, 256, _decode_q5_k, _pack_q5_k),
        "iq4_nl": _of_blocks(10, 18, 32, _decode_iq4_nl, _pack_iq4_nl),
        "iq4_xs": _of_blocks(11, 136, 256, _decode_iq4_xs, _pack_iq4_xs),
    }
)  # fmt: skip
