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
    Grid,
    Packed,
    Shape,
    Tensors,
    WithZero,
    least_error,
    nibbles,
    pairs,
    require,
    same_shape,
)
from fmoe_ext.frozen.formats.fp8_block import E4M3_MAX
from fmoe_ext.frozen.formats.mxfp4 import CODES, E2M1_MAX, e2m1, nearest_e2m1

SCALED = 16  # columns that share a scale
E4M3_MIN = 2**-9  # above zero


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


def _steps(q: Packed) -> torch.Tensor:
    assert q.scale is not None and q.zero is not None
    return q.scale.view(torch.float8_e4m3fn).float() * q.zero[..., :1] / q.zero[..., 1:]


def _decode(q: Packed) -> torch.Tensor:
    values = e2m1(q.device)[nibbles(q.data).int()]
    return (values.unflatten(-1, (-1, SCALED)) * _steps(q)[..., None]).flatten(-2)


def _grid(q: Packed) -> Grid:
    codes = torch.tensor(CODES, dtype=torch.uint8, device=q.device)
    step = _steps(q)
    return Grid(e2m1(q.device)[codes.int()], codes, step, torch.zeros_like(step))


def _recode(q: Packed, codes: torch.Tensor) -> torch.Tensor:
    return pairs(codes)


def in_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Round scales to E4M3, to its smallest number at least: of a block whose scale is 0 nothing would be left."""
    return scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)


def _rescale(q: Packed, factor: torch.Tensor) -> Tensors:
    assert q.scale is not None
    scale = in_e4m3(q.scale.view(torch.float8_e4m3fn).float() * factor)
    return q.data, scale.view(q.scale.dtype)


def _pack(weight: torch.Tensor, importance: torch.Tensor | None = None) -> WithZero:
    blocks = weight.unflatten(2, (-1, SCALED))
    largest = blocks.abs().amax(-1)
    factor = largest.amax((1, 2), keepdim=True) / (E2M1_MAX * E4M3_MAX)
    factor = torch.where(factor > 0, factor, 1)

    def codes(scale: torch.Tensor) -> torch.Tensor:
        return nearest_e2m1(blocks / (in_e4m3(scale).float() * factor)[..., None])

    wanted = largest / E2M1_MAX / factor
    if importance is not None:

        def rounded(scale: torch.Tensor) -> torch.Tensor:
            return e2m1(scale.device)[codes(scale).int()] * (in_e4m3(scale).float() * factor)[..., None]

        wanted = least_error(blocks, importance.unflatten(2, (-1, SCALED)), wanted, rounded)
    scale = in_e4m3(wanted)
    factors = torch.cat((factor, torch.ones_like(factor)), -1).expand(*weight.shape[:2], 2)
    return pairs(codes(wanted).flatten(2)), scale, factors.contiguous()


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
    is_fitted=True,
    grid=_grid,
    recode=_recode,
    rescale=_rescale,
)
