"""GGUF's Q4_0, Q8_0, Q4_K, Q5_K and Q6_K: a row is blocks of bytes that hold their scales.

Q4_0 and Q8_0 have 32 columns a block and a scale in float16. The K formats have 256 and a scale in float16 that small
integers multiply, one for each 32 columns (16 in Q6_K). Q4_K and Q5_K subtract a minimum, which is made the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch

from fmoe_ext.frozen.formats.base import Format, Grid, Packed, Shape, Tensors, refuse, require


def whole_blocks(block_bytes: int, block: int) -> Callable[[Packed], Shape]:
    """The check of a format whose rows are whole blocks of so many bytes and columns."""

    def check(q: Packed) -> Shape:
        data = require(q, "data", (torch.uint8,), 3)
        refuse(q, "scale", "zero")
        E, out, row_bytes = data.shape
        if row_bytes % block_bytes:
            raise ValueError(
                f"a row of {q.format} must be whole blocks of {block_bytes} bytes, but got {row_bytes} bytes"
            )
        return E, out, row_bytes // block_bytes * block

    return check


def half(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] -> float32 [..., 1]."""
    return data.contiguous().view(torch.float16).float()


def bytes_of_half(values: torch.Tensor) -> torch.Tensor:
    """[...] -> uint8 [..., 2] of float16."""
    return values.half()[..., None].view(torch.uint8)


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 of 0."""
    return torch.where(scale == 0, 0, 1 / scale)


def halves(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16] -> [..., 32] of 4 bits: the low ones, then the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def pairs_of_halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., 32] -> uint8 [..., 16]."""
    return codes[..., :16] | codes[..., 16:] << 4


def _decode_q8_0(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 34))
    return (half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)


def _pack_q8_0(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = blocks.abs().amax(-1) / 127
    scaled = blocks * inverse(scale)[..., None]
    codes = torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())  # half away from zero
    return torch.cat((bytes_of_half(scale), codes.to(torch.int8).view(torch.uint8)), -1).flatten(2), None


def _decode_q4_0(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 18))
    return (half(blocks[..., :2]) * (halves(blocks[..., 2:]).float() - 8)).flatten(-2)


def _pack_q4_0(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / -8
    codes = (blocks * inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((bytes_of_half(scale[..., 0]), pairs_of_halves(codes)), -1).flatten(2), None


def _steps_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(step, low) [..., 8] of blocks [..., 16 or more] of Q4_K or Q5_K."""
    d, dmin, packed = half(blocks[..., :2]), half(blocks[..., 2:4]), blocks[..., 4:16]
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
    """Codes [..., 8, 32] -> uint8 [..., 128]."""
    return (codes[..., ::2, :] | codes[..., 1::2, :] << 4).flatten(-2)


def _rescale_q4_k(q: Packed, factor: torch.Tensor) -> Tensors:
    blocks = q.data.unflatten(-1, (-1, 144))
    units = [bytes_of_half(half(blocks[..., i : i + 2])[..., 0] * factor) for i in (0, 2)]
    return torch.cat((*units, blocks[..., 4:]), -1).flatten(-2), None


def _head_k(blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., 8, 32] -> the first 16 bytes of a block of Q4_K or Q5_K, and its codes from 0 to most."""
    minimum = -blocks.amin(-1).clamp(max=0)
    scale = (blocks.amax(-1) + minimum) / most
    d, dmin = (t.amax(-1, keepdim=True).div(63).half().float() for t in (scale, minimum))
    scales, minima = ((t * inverse(unit)).round().clamp(0, 63) for t, unit in ((scale, d), (minimum, dmin)))
    step, low = (d * scales)[..., None], (dmin * minima)[..., None]
    codes = ((blocks + low) * inverse(step)).round().clamp(0, most).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[..., :4] | s[..., 4:] >> 4 << 6
    second = m[..., :4] | m[..., 4:] >> 4 << 6
    third = s[..., 4:] & 15 | (m[..., 4:] & 15) << 4
    return torch.cat((bytes_of_half(d[..., 0]), bytes_of_half(dmin[..., 0]), first, second, third), -1), codes


def _pack_q4_k(weight: torch.Tensor) -> Tensors:
    head, codes = _head_k(weight.unflatten(2, (-1, 8, 32)), 15)
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
    scale = half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return (scale[..., None] * values.flatten(-3).unflatten(-1, (16, 16))).flatten(-3)


def _pack_q6_k(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 16, 16))
    scale = blocks.abs().amax(-1) / 31
    d = scale.amax(-1, keepdim=True).div(127).half().float()
    scales = (scale * inverse(d)).round().clamp(0, 127)
    codes = (blocks * inverse(d * scales)[..., None]).round().clamp(-32, 31) + 32
    quarters = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    low = (quarters[..., :2, :] & 15 | (quarters[..., 2:, :] & 15) << 4).flatten(-3)
    high = quarters >> 4
    high = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    tail = (scales.to(torch.int8).view(torch.uint8), bytes_of_half(d[..., 0]))
    return torch.cat((low, high.flatten(-2), *tail), -1).flatten(2), None


LINEAR = MappingProxyType(
    {
        "q8_0": Format(
            4,
            "data uint8 [E, out, in / 32 * 34]",
            8.5,
            32,
            whole_blocks(34, 32),
            _decode_q8_0,
            _pack_q8_0,
            has_integers=True,
        ),
        "q4_k": Format(
            5,
            "data uint8 [E, out, in / 256 * 144]",
            4.5,
            256,
            whole_blocks(144, 256),
            _decode_q4_k,
            _pack_q4_k,
            has_integers=True,
            grid=_grid_q4_k,
            recode=_recode_q4_k,
            rescale=_rescale_q4_k,
        ),
        "q6_k": Format(
            6,
            "data uint8 [E, out, in / 256 * 210]",
            6.5625,
            256,
            whole_blocks(210, 256),
            _decode_q6_k,
            _pack_q6_k,
        ),
        "q4_0": Format(
            8,
            "data uint8 [E, out, in / 32 * 18]",
            4.5,
            32,
            whole_blocks(18, 32),
            _decode_q4_0,
            _pack_q4_0,
        ),
        "q5_k": Format(
            9,
            "data uint8 [E, out, in / 256 * 176]",
            5.5,
            256,
            whole_blocks(176, 256),
            _decode_q5_k,
            _pack_q5_k,
        ),
    }
)
