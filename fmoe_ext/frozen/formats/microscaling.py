"""Microscaling formats: floats of 4 or 8 bits in short blocks whose scale is a float of 8 bits.

    mxfp4     value = E2M1[code] * 2 ** (scale - 127)                    blocks of 32
    mxfp8     value = E4M3 * 2 ** (scale - 127)                          blocks of 32
    nvfp4     value = E2M1[code] * (scale * multiplied / divided)        blocks of 16, scale in E4M3

E2M1 is a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same below zero; two codes
are a byte, the lower bits first. The scale of MX (OCP's Microscaling, as GPT-OSS has it) is an exponent alone, E8M0, so
it shifts and never rounds; 255 is NaN.

NVFP4, as compressed-tensors and NVIDIA's Model Optimizer write it, has scales that round, of a short range: a factor of
the whole matrix moves them into it. compressed-tensors divides by that factor, Model Optimizer multiplies; x / f and
x * (1 / f) differ in the last bit. So `zero` has for each row what to multiply by and what to divide by, one of which
is 1, and values are the library's to the bit.
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import (
    Fitted,
    Grid,
    Lattice,
    Packed,
    Shape,
    Tensors,
    WithZero,
    least_error,
    nearest,
    nibbles,
    pairs,
    refuse,
    require,
    same_shape,
)
from fmoe_ext.frozen.formats.fp8_block import E4M3_MAX

_E2M1_MAX = 6.0
_E4M3_MIN = 2**-9  # above zero
_MX, _NV = 32, 16  # columns that share a scale


class _Mx(Lattice):
    """Base of MXFP4 and MXFP8: blocks of 32 with a power of two each."""

    block = _MX
    can_rescale = False

    def check_scale(self, q: Packed, shape: Shape) -> None:
        """Raise ValueError unless q has exponents [E, out, blocks], and no zero."""
        scale = require(q, "scale", (torch.uint8, torch.float8_e8m0fnu), 3)
        refuse(q, "zero")
        same_shape(q, "scale", scale, shape)

    def step(self, q: Packed) -> torch.Tensor:
        """Turn the exponents of q, uint8 or float8_e8m0fnu, into powers of two in float32, [E, out, blocks]."""
        assert q.scale is not None
        exponent = q.scale.view(torch.uint8).int()
        # The bits of 2^(e - 127) in float32: e is its exponent field. 2^-127 is subnormal, and 255 is NaN.
        bits = torch.where(exponent == 0, 0x400000, exponent << 23)
        return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)


class Mxfp4(_Mx, Fitted):
    """MXFP4: E2M1 in blocks of 32 with a power of two each."""

    number = 1
    tensors = "data uint8 [E, out, in / 32, 16], scale uint8 (e8m0) [E, out, in / 32]"
    bits = 4.25

    def check(self, q: Packed) -> Shape:
        blocks = require(q, "data", (torch.uint8,), 4)
        E, out, num_blocks, width = blocks.shape
        same_shape(q, "data", blocks, (E, out, num_blocks, 16))
        self.check_scale(q, (E, out, num_blocks))
        return E, out, num_blocks * 2 * width

    def decode(self, q: Packed) -> torch.Tensor:
        values = e2m1(q.device)[nibbles(q.data).int()]  # [E, out, blocks, 32]
        return (values * self.step(q)[..., None]).flatten(-2)

    def pack(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Tensors:
        blocks = weight.unflatten(2, (-1, _MX))
        scaled, scale = _scaled_by_powers_of_two(blocks, 2, _E2M1_MAX)
        if importance is not None:

            def rounded(step: torch.Tensor) -> torch.Tensor:
                return e2m1(step.device)[_nearest_e2m1(blocks / step[..., None]).int()] * step[..., None]

            exponent = scale.int() - 127
            # 2^100 is far from the ends of E8M0, so that half and twice a step exist; blocks beyond keep their scale
            step = torch.ldexp(torch.ones_like(blocks[..., 0]), exponent.clamp(-100, 100))
            step = least_error(blocks, importance.unflatten(2, (-1, _MX)), step, rounded, (1.0, 0.5, 2.0))
            exponent = torch.where(exponent.abs() < 100, torch.frexp(step)[1] - 1, exponent)
            scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-_E2M1_MAX, _E2M1_MAX)
            scale = (exponent + 127).to(torch.uint8)
        return pairs(_nearest_e2m1(scaled)), scale

    def of_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(2, (-1, 16))

    def grid(self, q: Packed) -> Grid:
        return _grid_of_e2m1(self.step(q))

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        return pairs(codes).view_as(q.data)


class Mxfp8(_Mx):
    """MXFP8: E4M3 in blocks of 32 with a power of two each."""

    number = 12
    tensors = "data float8_e4m3fn [E, out, in], scale uint8 or float8_e8m0fnu [E, out, in / 32]"
    bits = 8.25

    def check(self, q: Packed) -> Shape:
        data = require(q, "data", (torch.float8_e4m3fn,), 3)
        E, out, width = data.shape
        if width % _MX:
            raise ValueError(f"a row of mxfp8 must be whole blocks of {_MX} columns, but got {width}")
        self.check_scale(q, (E, out, width // _MX))
        return E, out, width

    def decode(self, q: Packed) -> torch.Tensor:
        return (q.data.float().unflatten(-1, (-1, _MX)) * self.step(q)[..., None]).flatten(-2)

    def pack(self, weight: torch.Tensor) -> Tensors:
        # 2^8 = 256 is the largest power of two in E4M3
        scaled, exponent = _scaled_by_powers_of_two(weight.unflatten(2, (-1, _MX)), 8, E4M3_MAX)
        return scaled.flatten(2).to(torch.float8_e4m3fn), exponent

    def of_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.float8_e4m3fn)

    def grid(self, q: Packed) -> Grid:
        # from -448 to 448, without -0 and NaN
        codes = torch.tensor([*range(0xFE, 0x80, -1), *range(0x7F)], dtype=torch.uint8, device=q.device)
        step = self.step(q)
        return Grid(codes.view(torch.float8_e4m3fn).float(), codes, step, torch.zeros_like(step))

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn)


class Nvfp4(Lattice, Fitted):
    """NVFP4: E2M1 in blocks of 16 with a scale in E4M3 each, and a factor of the whole matrix."""

    number = 13
    tensors = (
        "data uint8 [E, out, in / 2], scale float8_e4m3fn or uint8 [E, out, in / 16], zero float32 [E, out, 2]: what "
        "the scales of a row are multiplied by, and what they are divided by after that"
    )
    bits = 4.5
    block = 32  # the kernels read 32 columns at a time, which have two scales

    def check(self, q: Packed) -> Shape:
        data = require(q, "data", (torch.uint8,), 3)
        scale = require(q, "scale", (torch.float8_e4m3fn, torch.uint8), 3)
        factors = require(q, "zero", (torch.float32,), 3)
        E, out, half = data.shape
        if 2 * half % self.block:
            raise ValueError(f"a row of nvfp4 must be whole blocks of 32 columns, but got {2 * half}")
        same_shape(q, "scale", scale, (E, out, 2 * half // _NV))
        same_shape(q, "zero", factors, (E, out, 2))
        return E, out, 2 * half

    def decode(self, q: Packed) -> torch.Tensor:
        values = e2m1(q.device)[nibbles(q.data).int()]
        return (values.unflatten(-1, (-1, _NV)) * self.step(q)[..., None]).flatten(-2)

    def step(self, q: Packed) -> torch.Tensor:
        """Compute the scale of each block as float32, [E, out, blocks]."""
        assert q.scale is not None and q.zero is not None
        # in this order, with both factors: one product of them would round otherwise
        return q.scale.view(torch.float8_e4m3fn).float() * q.zero[..., :1] / q.zero[..., 1:]

    def pack(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> WithZero:
        blocks = weight.unflatten(2, (-1, _NV))
        largest = blocks.abs().amax(-1)
        factor = largest.amax((1, 2), keepdim=True) / (_E2M1_MAX * E4M3_MAX)
        factor = torch.where(factor > 0, factor, 1)

        def codes(scale: torch.Tensor) -> torch.Tensor:
            return _nearest_e2m1(blocks / (in_e4m3(scale).float() * factor)[..., None])

        wanted = largest / _E2M1_MAX / factor
        if importance is not None:

            def rounded(scale: torch.Tensor) -> torch.Tensor:
                return e2m1(scale.device)[codes(scale).int()] * (in_e4m3(scale).float() * factor)[..., None]

            wanted = least_error(blocks, importance.unflatten(2, (-1, _NV)), wanted, rounded)
        factors = torch.cat((factor, torch.ones_like(factor)), -1).expand(*weight.shape[:2], 2)
        return pairs(codes(wanted).flatten(2)), in_e4m3(wanted), factors.contiguous()

    def grid(self, q: Packed) -> Grid:
        return _grid_of_e2m1(self.step(q))

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        return pairs(codes)

    def rescale(self, q: Packed, factor: torch.Tensor) -> Tensors:
        assert q.scale is not None
        scale = in_e4m3(q.scale.view(torch.float8_e4m3fn).float() * factor)
        return q.data, scale.view(q.scale.dtype)


def e2m1(device: torch.device) -> torch.Tensor:
    """Compute the value of each code, [16], on the device: CUDA graphs refuse to copy a table from the host."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    magnitude = code & 7
    # the exponent and mantissa of a code moved to where float32 has them; below 2 they are subnormal
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude * 0.5, normal)
    return torch.where(code < 8, value, -value)


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the uint8 codes of the nearest values of E2M1."""
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), device=values.device)
    return nearest(values.abs(), table) | (values < 0).to(torch.uint8) << 3


def _grid_of_e2m1(step: torch.Tensor) -> Grid:
    """Return the values of E2M1 times step [E, out, blocks]."""
    # in the order of their values, without -0
    codes = torch.tensor((*range(15, 8, -1), *range(8)), dtype=torch.uint8, device=step.device)
    return Grid(e2m1(step.device)[codes.int()], codes, step, torch.zeros_like(step))


def _scaled_by_powers_of_two(
    blocks: torch.Tensor, exponent_of_codes: int, most: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide blocks [..., n] by powers of two as OCP MX 1.0 chooses them -> (blocks within +-most, uint8 exponents).

    exponent_of_codes: the exponent of the largest power of two among the codes, which the largest magnitude of a block
    gets.
    """
    largest = blocks.abs().amax(-1)
    exponent = (torch.frexp(largest)[1] - 1 - exponent_of_codes).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, -127)
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-most, most)
    return scaled, (exponent + 127).to(torch.uint8)


def in_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Round scales to E4M3, but not to 0, which would leave nothing of a block."""
    return scale.clamp(_E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
