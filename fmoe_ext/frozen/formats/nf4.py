"""NF4, as bitsandbytes has it: quantiles of the normal distribution in blocks with a scale each.

    value = NF4_CODE[code] * scale      code: 4 bits, the higher ones of a byte first

Weights are about normal, so codes at its quantiles are used equally often (QLoRA: Dettmers et al., 2023,
https://arxiv.org/abs/2305.14314). With double quantisation a file has the scales in 8 bits too (nf4_scales).
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import (
    Format,
    Packed,
    Shape,
    Tensors,
    nearest,
    nibbles,
    pairs,
    refuse,
    require,
    same_shape,
    table_of,
)

# As bitsandbytes stores them.
NF4_CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4(Format):
    """Quantiles of the normal distribution in blocks of 64, or another multiple of 32, with a scale each."""

    number = 7
    tensors = "data uint8 [E, out, in / 2], scale float32 [E, out, in / blocksize]"
    bits = 4.5
    block = 64

    def check(self, q: Packed) -> Shape:
        data, scale = require(q, "data", (torch.uint8,), 3), require(q, "scale", (torch.float32,), 3)
        refuse(q, "zero")
        E, out, half = data.shape
        same_shape(q, "scale", scale, (E, out, scale.shape[2]))
        if scale.shape[2] == 0 or 2 * half % scale.shape[2] or 2 * half // scale.shape[2] % 32:
            raise ValueError(
                f"a row of nf4 must be whole blocks of a multiple of 32 columns, but got {scale.shape[2]} blocks of "
                f"{2 * half} columns"
            )
        return E, out, 2 * half

    def decode(self, q: Packed) -> torch.Tensor:
        assert q.scale is not None
        values = table_of(NF4_CODE, q.device)[nibbles(q.data, high_first=True).int()]
        return (values.unflatten(-1, (q.scale.shape[2], -1)) * q.scale[..., None]).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(2, (-1, 64))
        scale = blocks.abs().amax(-1)
        scaled = blocks / torch.where(scale > 0, scale, 1)[..., None]
        codes = nearest(scaled, torch.tensor(NF4_CODE, device=weight.device)).flatten(2)
        return pairs(codes, high_first=True), scale


def nf4_scales(
    absmax: torch.Tensor, nested_absmax: torch.Tensor, code: torch.Tensor, offset: float
) -> torch.Tensor:
    """Decode scales of double quantisation: absmax uint8 [n], nested_absmax float32 [n / 256], code float32 [256].

    As bitsandbytes: code[absmax] * nested_absmax of its block of 256, plus offset. Returns float32 [n].
    """
    nested = nested_absmax.repeat_interleave(256)[: absmax.numel()]
    return code[absmax.flatten().int()] * nested + offset
