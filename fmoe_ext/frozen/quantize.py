"""quantize(): packs weights of experts in the formats of frozen.FORMATS, by plain rounding, for examples and tests."""

from collections.abc import Callable
from types import MappingProxyType

import torch

from fmoe_ext.frozen.quantized import FORMATS, FP8_BLOCK, NF4_CODE, Quantized

E2M1_MAX, E4M3_MAX = 6.0, 448.0


def quantize(weight: torch.Tensor, format: str) -> Quantized:
    """weight [E, out, in] rounded to the nearest values of a format, a name in FORMATS.

    No calibration: each scale comes from the largest magnitude of its block. int4 has groups of 32, symmetric; nf4
    blocks of 64, without nested scales. Raises ValueError for an unknown format, and for rows that are no whole blocks.
    """
    if format not in FORMATS:
        raise ValueError(f'unknown format "{format}": known are {", ".join(FORMATS)}')
    if weight.dim() != 3:
        raise ValueError(f"weight must have shape [E, out, in], but got {list(weight.shape)}")
    block, pack = _PACKERS[format]
    if weight.shape[2] % block:
        raise ValueError(
            f"rows of {format} must be whole blocks of {block}, but got shape {list(weight.shape)}"
        )
    return pack(weight.detach().float())


def nf4_scales(
    absmax: torch.Tensor, nested_absmax: torch.Tensor, code: torch.Tensor, offset: float
) -> torch.Tensor:
    """Scales of NF4 with double quantisation: absmax uint8 [n], nested_absmax float32 [n / 256], code float32 [256].

    As bitsandbytes: code[absmax] * nested_absmax of its block of 256, plus offset. Returns float32 [n].
    """
    nested = nested_absmax.repeat_interleave(256)[: absmax.numel()]
    return code[absmax.flatten().int()] * nested + offset


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """uint8 index of the nearest entry of an increasing table."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def _pairs(codes: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """4-bit codes [..., 2n] -> uint8 [..., n]."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return first << 4 | second if high_first else first | second << 4


def _mxfp4(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(2, (-1, 32))
    largest = blocks.abs().amax(-1)
    # The exponent of the largest magnitude, less that of 4, the largest power of two in E2M1 (OCP MX 1.0).
    exponent = (torch.frexp(largest)[1] - 1 - 2).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-E2M1_MAX, E2M1_MAX)
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=weight.device)
    codes = _nearest(scaled.abs(), table) | (scaled < 0).to(torch.uint8) << 3
    return Quantized("mxfp4", _pairs(codes), (exponent + 127).to(torch.uint8))


def _fp8_block(weight: torch.Tensor) -> Quantized:
    E, out, width = weight.shape
    rows, columns = -(-out // FP8_BLOCK), -(-width // FP8_BLOCK)
    padded = weight.new_zeros(E, rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[:, :out, :width] = weight
    blocks = padded.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
    scale = blocks.abs().amax((2, 4)) / E4M3_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    scaled = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :out, :width]
    return Quantized("fp8_block", scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def _int4(weight: torch.Tensor) -> Quantized:
    groups = weight.unflatten(2, (-1, 32))
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    divisor = torch.where(scale > 0, scale, 1).float()[..., None]
    codes = ((groups / divisor).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(2)
    return Quantized("int4", _pairs(codes).view(torch.int32), scale)


def _nf4(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(2, (-1, 64))
    scale = blocks.abs().amax(-1)
    scaled = blocks / torch.where(scale > 0, scale, 1)[..., None]
    codes = _nearest(scaled, torch.tensor(NF4_CODE, device=weight.device)).flatten(2)
    return Quantized("nf4", _pairs(codes, high_first=True), scale)


def _half_bytes(values: torch.Tensor) -> torch.Tensor:
    """[...] -> uint8 [..., 2] of float16."""
    return values.half()[..., None].view(torch.uint8)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _q8_0(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(2, (-1, 32))
    scale = blocks.abs().amax(-1) / 127
    scaled = blocks * _inverse(scale)[..., None]
    codes = torch.where(scaled < 0, (scaled - 0.5).ceil(), (scaled + 0.5).floor())  # half away from zero
    return Quantized(
        "q8_0", torch.cat((_half_bytes(scale), codes.to(torch.int8).view(torch.uint8)), -1).flatten(2)
    )


def _q4_k(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(2, (-1, 8, 32))
    minimum = -blocks.amin(-1).clamp(max=0)
    scale = (blocks.amax(-1) + minimum) / 15
    d, dmin = (t.amax(-1, keepdim=True).div(63).half().float() for t in (scale, minimum))
    scales, minima = ((t * _inverse(unit)).round().clamp(0, 63) for t, unit in ((scale, d), (minimum, dmin)))
    step, low = (d * scales)[..., None], (dmin * minima)[..., None]
    codes = ((blocks + low) * _inverse(step)).round().clamp(0, 15).to(torch.uint8)
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[..., :4] | s[..., 4:] >> 4 << 6
    second = m[..., :4] | m[..., 4:] >> 4 << 6
    third = s[..., 4:] & 15 | (m[..., 4:] & 15) << 4
    pairs = (codes[..., ::2, :] | codes[..., 1::2, :] << 4).flatten(-2)
    head = (_half_bytes(d[..., 0]), _half_bytes(dmin[..., 0]), first, second, third)
    return Quantized("q4_k", torch.cat((*head, pairs), -1).flatten(2))


def _q6_k(weight: torch.Tensor) -> Quantized:
    blocks = weight.unflatten(2, (-1, 16, 16))
    scale = blocks.abs().amax(-1) / 31
    d = scale.amax(-1, keepdim=True).div(127).half().float()
    scales = (scale * _inverse(d)).round().clamp(0, 127)
    codes = (blocks * _inverse(d * scales)[..., None]).round().clamp(-32, 31) + 32
    quarters = codes.to(torch.uint8).flatten(-2).unflatten(-1, (2, 4, 32))
    low = (quarters[..., :2, :] & 15 | (quarters[..., 2:, :] & 15) << 4).flatten(-3)
    high = quarters >> 4
    high = high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
    tail = (scales.to(torch.int8).view(torch.uint8), _half_bytes(d[..., 0]))
    return Quantized("q6_k", torch.cat((low, high.flatten(-2), *tail), -1).flatten(2))


# {format: (columns of a row's blocks, packer)}
_PACKERS: MappingProxyType[str, tuple[int, Callable[[torch.Tensor], Quantized]]] = MappingProxyType(
    {
        "mxfp4": (32, _mxfp4),
        "fp8_block": (1, _fp8_block),
        "int4": (32, _int4),
        "q8_0": (32, _q8_0),
        "q4_k": (256, _q4_k),
        "q6_k": (256, _q6_k),
        "nf4": (64, _nf4),
    }
)
