"""NVFP4, as compressed-tensors and NVIDIA's Model Optimizer write it: E2M1 in blocks of 16 with a scale in E4M3 each.

    value = E2M1[code] * (scale * multiplied / divided)      code: 4 bits, the lower ones of a byte first

E4M3 has a short range, so a factor of the whole matrix moves the scales into it. compressed-tensors divides by that
factor, Model Optimizer multiplies; x / f and x * (1 / f) differ in the last bit. A row has both factors in `zero`, one
of which is 1, so that its values are the library's to the bit.
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import (
    Format,
    Packed,
    Shape,
    WithZero,
    nibbles,
    pairs,
    require,
    same_shape,
)
from fmoe_ext.frozen.formats.fp8_block import E4M3_MAX
from fmoe_ext.frozen.formats.mxfp4 import E2M1_MAX, e2m1, nearest_e2m1

SCALED = 16  # columns that share a scale


def _check(q: Packed) -> Shape:
    data = require(q, "data", (torch.uint8,), 3)
    scale = require(q, "scale", (torch.float8_e4m3fn, torch.uint8), 3)
    factors = require(q, "zero", (torch.float32,), 3)
    E, out, half = data.shape
    if half % SCALED:
        raise ValueError(f"a row of nvfp4 must be whole blocks of 32 columns, but got {2 * half}")
    same_shape(q, "scale", scale, (E, out, 2 * half // SCALED))
    same_shape(q, "zero", factors, (E, out, 2))
    return E, out, 2 * half


def _decode(q: Packed) -> torch.Tensor:
    assert q.scale is not None and q.zero is not None
    step = q.scale.view(torch.float8_e4m3fn).float() * q.zero[..., :1] / q.zero[..., 1:]
    values = e2m1(q.device)[nibbles(q.data).int()]
    return (values.unflatten(-1, (-1, SCALED)) * step[..., None]).flatten(-2)


def _pack(weight: torch.Tensor) -> WithZero:
    blocks = weight.unflatten(2, (-1, SCALED))
    largest = blocks.abs().amax(-1)
    factor = largest.amax((1, 2), keepdim=True) / (E2M1_MAX * E4M3_MAX)
    factor = torch.where(factor > 0, factor, 1)
    # At least the smallest number of E4M3: a scale of 0 would leave nothing of its block.
    scale = (largest / E2M1_MAX / factor).clamp(min=2**-9).to(torch.float8_e4m3fn)
    codes = nearest_e2m1(blocks / (scale.float() * factor)[..., None]).flatten(2)
    factors = torch.cat((factor, torch.ones_like(factor)), -1).expand(*weight.shape[:2], 2)
    return pairs(codes), scale, factors.contiguous()


NVFP4 = Format(
    number=13,
    tensors=(
        "data uint8 [E, out, in / 2], scale float8_e4m3fn or uint8 [E, out, in / 16], zero float32 [E, out, 2]: what "
        "the scales of a row are multiplied by, and what they are divided by after that"
    ),
    bits=4.5,
    block=32,
    check=_check,
    decode=_decode,
    pack=_pack,
)
