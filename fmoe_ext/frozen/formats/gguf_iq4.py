"""GGUF's IQ4_NL and IQ4_XS: codes of 4 bits that stand for numbers of a table, in blocks that hold their scales."""

from __future__ import annotations

from types import MappingProxyType

import torch

from fmoe_ext.frozen.formats.base import Format, Packed, Tensors, nearest
from fmoe_ext.frozen.formats.gguf import bytes_of_half, half, halves, inverse, pairs_of_halves, whole_blocks

# As llama.cpp has them (kvalues_iq4nl).
CODES = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)


def _values(codes: torch.Tensor) -> torch.Tensor:
    # Filled on the device: torch.tensor would copy from the host, which CUDA graphs refuse.
    table = torch.stack([torch.full((), code, dtype=torch.float32, device=codes.device) for code in CODES])
    return table[codes.int()]


def _codes(scaled: torch.Tensor) -> torch.Tensor:
    return nearest(scaled, torch.tensor(CODES, device=scaled.device))


def _decode_iq4_nl(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 18))
    return (half(blocks[..., :2]) * _values(halves(blocks[..., 2:]))).flatten(-2)


def _pack_iq4_nl(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    scale = _signed_scale(blocks).half()
    codes = _codes(blocks * inverse(scale.float())[..., None])
    return torch.cat((bytes_of_half(scale), pairs_of_halves(codes)), -1).flatten(2), None


def _signed_scale(blocks: torch.Tensor) -> torch.Tensor:
    """The scale [...] with which the largest magnitude of a block [..., 32] is the first of CODES."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))[..., 0] / CODES[0]


def _decode_iq4_xs(q: Packed) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 136))
    low = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    high = torch.stack([blocks[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    scale = half(blocks[..., :2]) * ((low | high << 4).float() - 32)
    values = _values(halves(blocks[..., 8:].unflatten(-1, (8, 16))))
    return (scale[..., None] * values).flatten(-3)


def _pack_iq4_xs(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, 8, 32))
    scale = _signed_scale(blocks)
    d = (scale.gather(-1, scale.abs().argmax(-1, keepdim=True)) / -32).half()
    scales = (scale * inverse(d.float())).round().clamp(-32, 31)
    codes = _codes(blocks * inverse(d.float() * scales)[..., None])
    s = (scales + 32).to(torch.uint8)
    low = s[..., ::2] & 15 | (s[..., 1::2] & 15) << 4
    high = (s >> 4).unflatten(-1, (2, 4))
    high = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    head = (bytes_of_half(d[..., 0]), high, low)
    return torch.cat((*head, pairs_of_halves(codes).flatten(-2)), -1).flatten(2), None


IQ4 = MappingProxyType(
    {
        "iq4_nl": Format(
            10,
            "data uint8 [E, out, in / 32 * 18]",
            4.5,
            32,
            whole_blocks(18, 32),
            _decode_iq4_nl,
            _pack_iq4_nl,
        ),
        "iq4_xs": Format(
            11,
            "data uint8 [E, out, in / 256 * 136]",
            4.25,
            256,
            whole_blocks(136, 256),
            _decode_iq4_xs,
            _pack_iq4_xs,
        ),
    }
)
