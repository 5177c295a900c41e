"""MXFP8, as OCP's Microscaling has it: E4M3 in blocks of 32 with a power of two each."""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import Format, Grid, Packed, Shape, Tensors, refuse, require, same_shape
from fmoe_ext.frozen.formats.fp8_block import E4M3_MAX
from fmoe_ext.frozen.formats.mxfp4 import BLOCK, steps


def _check(q: Packed) -> Shape:
    data = require(q, "data", (torch.float8_e4m3fn,), 3)
    scale = require(q, "scale", (torch.uint8, torch.float8_e8m0fnu), 3)
    refuse(q, "zero")
    E, out, width = data.shape
    if width % BLOCK:
        raise ValueError(f"a row of mxfp8 must be whole blocks of {BLOCK} columns, but got {width}")
    same_shape(q, "scale", scale, (E, out, width // BLOCK))
    return E, out, width


def _decode(q: Packed) -> torch.Tensor:
    assert q.scale is not None
    return (q.data.float().unflatten(-1, (-1, BLOCK)) * steps(q.scale)[..., None]).flatten(-2)


def _grid(q: Packed) -> Grid:
    assert q.scale is not None
    # from -448 to 448, without -0 and NaN
    codes = torch.tensor([*range(0xFE, 0x80, -1), *range(0x7F)], dtype=torch.uint8, device=q.device)
    step = steps(q.scale)
    return Grid(codes.view(torch.float8_e4m3fn).float(), codes, step, torch.zeros_like(step))


def _recode(q: Packed, codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn)


def _pack(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(2, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    # The exponent of the largest magnitude, less that of 256, the largest power of two in E4M3 (OCP MX 1.0).
    exponent = (torch.frexp(largest)[1] - 1 - 8).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.flatten(2).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


MXFP8 = Format(
    number=12,
    tensors="data float8_e4m3fn [E, out, in], scale uint8 or float8_e8m0fnu [E, out, in / 32]",
    bits=8.25,
    block=BLOCK,
    check=_check,
    decode=_decode,
    pack=_pack,
    of_bytes=lambda rows: rows.view(torch.float8_e4m3fn),
    grid=_grid,
    recode=_recode,
)
