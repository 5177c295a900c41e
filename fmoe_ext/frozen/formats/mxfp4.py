"""MXFP4, as GPT-OSS and OCP's Microscaling have it: E2M1 in blocks of 32 with a power of two each.

    value = E2M1[code] * 2 ** (scale - 127)      code: 4 bits, the lower ones of a byte first

A code is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero. The
scale is an exponent alone (E8M0), so it shifts and never rounds. 255 is NaN.
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import (
    Format,
    Grid,
    Packed,
    Shape,
    Tensors,
    least_error,
    nearest,
    nibbles,
    pairs,
    refuse,
    require,
    same_shape,
)

BLOCK, E2M1_MAX = 32, 6.0
CODES = (*range(15, 8, -1), *range(8))  # in the order of their values, without -0


def _check(q: Packed) -> Shape:
    blocks, scale = (
        require(q, "data", (torch.uint8,), 4),
        require(q, "scale", (torch.uint8, torch.float8_e8m0fnu), 3),
    )
    refuse(q, "zero")
    E, out, num_blocks, width = blocks.shape
    same_shape(q, "data", blocks, (E, out, num_blocks, 16))
    same_shape(q, "scale", scale, (E, out, num_blocks))
    return E, out, num_blocks * 2 * width


def e2m1(device: torch.device) -> torch.Tensor:
    """Compute the value of each code: a table on the host would be copied, which CUDA graphs refuse."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    magnitude = code & 7
    # the exponent and mantissa of a code moved to where float32 has them; below 2 they are subnormal
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude * 0.5, normal)
    return torch.where(code < 8, value, -value)


def steps(scale: torch.Tensor) -> torch.Tensor:
    """Turn exponents, uint8 or float8_e8m0fnu, into powers of two in float32."""
    exponent = scale.view(torch.uint8).int()
    # The bits of 2^(e - 127); 2^-127 is subnormal, and 255 is NaN.
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


def _decode(q: Packed) -> torch.Tensor:
    assert q.scale is not None
    values = e2m1(q.device)[nibbles(q.data).int()]
    return (values * steps(q.scale)[..., None]).flatten(-2)


def _grid(q: Packed) -> Grid:
    assert q.scale is not None
    codes = torch.tensor(CODES, dtype=torch.uint8, device=q.device)
    step = steps(q.scale)
    return Grid(e2m1(q.device)[codes.int()], codes, step, torch.zeros_like(step))


def _recode(q: Packed, codes: torch.Tensor) -> torch.Tensor:
    return pairs(codes).view_as(q.data)


def nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes of the nearest values of E2M1."""
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=values.device)
    return nearest(values.abs(), table) | (values < 0).to(torch.uint8) << 3


def _pack(weight: torch.Tensor, importance: torch.Tensor | None = None) -> Tensors:
    blocks = weight.unflatten(2, (-1, 32))
    largest = blocks.abs().amax(-1)
    # The exponent of the largest magnitude, less that of 4, the largest power of two in E2M1 (OCP MX 1.0).
    exponent = (torch.frexp(largest)[1] - 1 - 2).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    if importance is not None:

        def rounded(step: torch.Tensor) -> torch.Tensor:
            return e2m1(step.device)[nearest_e2m1(blocks / step[..., None]).int()] * step[..., None]

        # within what E8M0 has in normal numbers
        step = torch.ldexp(torch.ones_like(largest), exponent.clamp(-100, 100))
        step = least_error(blocks, importance.unflatten(2, (-1, 32)), step, rounded, (1.0, 0.5, 2.0))
        exponent = torch.where(exponent.abs() < 100, torch.frexp(step)[1] - 1, exponent)
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-E2M1_MAX, E2M1_MAX)
    return pairs(nearest_e2m1(scaled)), (exponent + 127).to(torch.uint8)


MXFP4 = Format(
    number=1,
    tensors="data uint8 [E, out, in / 32, 16], scale uint8 (e8m0) [E, out, in / 32]",
    bits=4.25,
    block=BLOCK,
    check=_check,
    decode=_decode,
    pack=_pack,
    is_fitted=True,
    of_bytes=lambda rows: rows.unflatten(2, (-1, 16)),
    grid=_grid,
    recode=_recode,
)
