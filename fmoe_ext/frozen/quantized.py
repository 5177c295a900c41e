"""Frozen weights of experts in the formats that models are published in, and their decoding in plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch

Shape: TypeAlias = tuple[int, int, int]


class Format(NamedTuple):
    """A format of packed weights. Numbered as in csrc/gemm/packed.h."""

    number: int
    tensors: str  # shapes of data, scale and zero
    bits: float  # of a weight, scales included
    check: Callable[["Quantized"], Shape]
    decode: Callable[["Quantized"], torch.Tensor]  # -> float32 [E, out, in], gate and up as they lie


@dataclass(frozen=True)
class Quantized:
    """A weight [E, out, in] of all experts, packed as its file has it. The first dimension of each tensor is E.

    format: a name in FORMATS, which says what data, scale and zero are; None where a format lacks one of them.
    interleaved: the rows are gate, up, gate, up, ..., as GPT-OSS has them. Operators then take b1 and lora1.b in that
    order too, and compute with all gates before all ups.
    Raises ValueError for an unknown format, missing tensors, other dtypes or shapes.
    """

    format: str
    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f'unknown format "{self.format}": known are {", ".join(FORMATS)}')
        shape = FORMATS[self.format].check(self)
        if self.interleaved and shape[1] % 2:
            raise ValueError(f"interleaved rows must be an even number, but got {shape[1]}")
        object.__setattr__(self, "_shape", shape)

    @property
    def shape(self) -> Shape:
        """(E, out, in) of the decoded weight."""
        return self._shape  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.zero) if t is not None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Quantized":
        """The weight of function(tensor) for each of its tensors: a slice of experts, or another device."""
        scale, zero = (None if t is None else function(t) for t in (self.scale, self.zero))
        return Quantized(self.format, function(self.data), scale, zero, self.interleaved)

    @staticmethod
    def joined(
        format: str, data: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, parts: int
    ) -> "Quantized":
        """The weight of parts that were packed apart and whose rows follow each other: gate and up, say."""
        if format == "fp8_block" and parts > 1 and scale is not None:
            scale = scale.unflatten(1, (parts, -1))
        return Quantized(format, data, scale, zero)

    def rows(self) -> torch.Tensor:
        """The bytes of data, uint8 [E, out, bytes of a row], without a copy."""
        return self._rows if self.data.is_contiguous() else _rows_of(self.data)

    @cached_property
    def _rows(self) -> torch.Tensor:
        return _rows_of(self.data)  # views cost as much time as a short product

    def packing(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int, bool]:
        """scale, zero, number of the format, interleaved: what operators take beside rows()."""
        scale = self.scale
        if scale is not None and scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        return scale, self.zero, FORMATS[self.format].number, self.interleaved

    @staticmethod
    def of_rows(
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None,
        number: int,
        interleaved: bool = False,
    ) -> "Quantized":
        """The weight of what rows() and packing() returned."""
        name = next(name for name, kind in FORMATS.items() if kind.number == number)
        if name == "mxfp4":
            rows = rows.unflatten(2, (-1, 16))
        elif name == "fp8_block":
            rows = rows.view(torch.float8_e4m3fn)
        elif name == "int4":
            rows = rows.view(torch.int32)
        return Quantized(name, rows, scale, zero, interleaved)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [E, out, in], decoded in float32 and rounded to dtype; gates before ups if interleaved."""
        weight = FORMATS[self.format].decode(self).to(dtype)
        return gates_first(weight) if self.interleaved else weight


def _rows_of(data: torch.Tensor) -> torch.Tensor:
    return data.flatten(2).contiguous().view(torch.uint8)


def gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Dimension 1 reordered from gate, up, gate, up, ... to all gates, then all ups."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _require(q: Quantized, name: str, dtypes: tuple[torch.dtype, ...], dims: int) -> torch.Tensor:
    t: torch.Tensor | None = getattr(q, name)
    if t is None:
        raise ValueError(f"{q.format} needs {name}: {FORMATS[q.format].tensors}")
    if t.dtype not in dtypes or t.dim() != dims:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} of {q.format} must be {names} with {dims} dimensions, but got {t.dtype} {list(t.shape)}"
        )
    if t.shape[0] != q.data.shape[0]:
        raise ValueError(f"{name} must be of {q.data.shape[0]} experts like data, but got {list(t.shape)}")
    if t.device != q.data.device:
        raise ValueError(f"{name} must be on {q.data.device} like data, but it is on {t.device}")
    return t


def _refuse(q: Quantized, *names: str) -> None:
    for name in names:
        if getattr(q, name) is not None:
            raise ValueError(f"{q.format} has no {name}, but got one: {FORMATS[q.format].tensors}")


def _same_shape(q: Quantized, name: str, got: torch.Tensor, *expected: tuple[int, ...]) -> None:
    if tuple(got.shape) not in expected:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise ValueError(
            f"{name} must have shape {wanted} for {q.format} data {list(q.data.shape)}, but got {list(got.shape)}"
        )


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Quantiles of the normal distribution (Dettmers et al. 2023), as bitsandbytes stores them.
NF4_CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def _nibbles(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2n] of 4 bits."""
    halves = (data >> 4, data & 15) if high_first else (data & 15, data >> 4)
    return torch.stack(halves, -1).flatten(-2)


def _check_mxfp4(q: Quantized) -> Shape:
    blocks, scale = (
        _require(q, "data", (torch.uint8,), 4),
        _require(q, "scale", (torch.uint8, torch.float8_e8m0fnu), 3),
    )
    _refuse(q, "zero")
    E, out, num_blocks, width = blocks.shape
    _same_shape(q, "data", blocks, (E, out, num_blocks, 16))
    _same_shape(q, "scale", scale, (E, out, num_blocks))
    return E, out, num_blocks * 2 * width


def _e2m1(device: torch.device) -> torch.Tensor:
    """The value of each code. Computed on the device: a table of the host would be copied, which CUDA graphs refuse."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(magnitude < 2, magnitude * 0.5, normal)
    return torch.where(code < 8, value, -value)


def _decode_mxfp4(q: Quantized) -> torch.Tensor:
    assert q.scale is not None
    values = _e2m1(q.device)[_nibbles(q.data).int()]
    exponent = q.scale.view(torch.uint8).int()
    # The bits of 2^(e - 127); 2^-127 is subnormal, and 255 is NaN.
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return (values * bits.view(torch.float32)[..., None]).flatten(-2)


FP8_BLOCK = 128


def _check_fp8(q: Quantized) -> Shape:
    data = _require(q, "data", (torch.float8_e4m3fn,), 3)
    is_joined = q.scale is not None and q.scale.dim() == 4
    scale = _require(q, "scale", (torch.float32, torch.bfloat16), 4 if is_joined else 3)
    _refuse(q, "zero")
    E, out, width = data.shape
    parts = scale.shape[1] if is_joined else 1
    if parts == 0 or out % parts:
        raise ValueError(f"data of fp8_block {list(data.shape)} has no {parts} equal parts, as scale has")
    blocks = (-(-(out // parts) // FP8_BLOCK), -(-width // FP8_BLOCK))
    _same_shape(q, "scale", scale, (E, parts, *blocks) if is_joined else (E, *blocks))
    return E, out, width


def _decode_fp8(q: Quantized) -> torch.Tensor:
    assert q.scale is not None
    _, out, width = q.data.shape
    size = out // (q.scale.shape[1] if q.scale.dim() == 4 else 1)
    row = torch.arange(out, device=q.device)
    row = row // max(size, 1) * -(-size // FP8_BLOCK) + row % max(size, 1) // FP8_BLOCK
    column = torch.arange(width, device=q.device) // FP8_BLOCK
    return q.data.float() * q.scale.flatten(1, -2).float()[:, row][:, :, column]


def _check_int4(q: Quantized) -> Shape:
    data, scale = _require(q, "data", (torch.int32,), 3), _require(q, "scale", _FLOATS, 3)
    E, out, words = data.shape
    groups = scale.shape[2]
    _same_shape(q, "scale", scale, (E, out, groups))
    if groups == 0 or words * 8 % groups or words * 8 // groups % 32:
        raise ValueError(
            f"groups of int4 must be whole multiples of 32 columns, but got {groups} groups of {words * 8} columns"
        )
    if q.zero is not None:
        zero = _require(q, "zero", (torch.int32,), 3)
        _same_shape(q, "zero", zero, (E, -(-out // 8), groups))
    return E, out, words * 8


def _words(packed: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> [..., 8 n] of 4 bits, the lowest first."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return ((packed[..., None] >> shifts) & 15).flatten(-2)


def _decode_int4(q: Quantized) -> torch.Tensor:
    assert q.scale is not None
    E, out, groups = q.scale.shape
    values = _words(q.data).reshape(E, out, groups, -1)
    # Values and zero points are both stored with 8 added.
    zero = 8 if q.zero is None else _words(q.zero.mT).mT[:, :out].unsqueeze(-1)
    return ((values - zero).float() * q.scale.float()[..., None]).flatten(-2)


def _gguf(block_bytes: int, block: int) -> Callable[[Quantized], Shape]:
    def check(q: Quantized) -> Shape:
        data = _require(q, "data", (torch.uint8,), 3)
        _refuse(q, "scale", "zero")
        E, out, row_bytes = data.shape
        if row_bytes % block_bytes:
            raise ValueError(
                f"a row of {q.format} must be whole blocks of {block_bytes} bytes, but got {row_bytes} bytes"
            )
        return E, out, row_bytes // block_bytes * block

    return check


def _half(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] -> float32 [..., 1]."""
    return data.contiguous().view(torch.float16).float()


def _decode_q8_0(q: Quantized) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 34))
    return (_half(blocks[..., :2]) * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)


def _decode_q4_k(q: Quantized) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 144))
    d, dmin, packed = _half(blocks[..., :2]), _half(blocks[..., 2:4]), blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimum = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    pairs = blocks[..., 16:].unflatten(-1, (4, 1, 32))
    values = torch.cat((pairs & 15, pairs >> 4), -2).flatten(-3, -2)  # [..., 8, 32]
    return ((d * scale)[..., None] * values - (dmin * minimum)[..., None]).flatten(-3)


def _decode_q6_k(q: Quantized) -> torch.Tensor:
    blocks = q.data.unflatten(-1, (-1, 210))
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat((low & 15, low >> 4), -2).unflatten(-1, (2, 32)).flatten(-3, -2)  # [..., 2, 4, 32]
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    values = (low | high << 4).to(torch.int8) - 32
    scale = _half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    return (scale[..., None] * values.flatten(-3).unflatten(-1, (16, 16))).flatten(-3)


def _check_nf4(q: Quantized) -> Shape:
    data, scale = _require(q, "data", (torch.uint8,), 3), _require(q, "scale", (torch.float32,), 3)
    _refuse(q, "zero")
    E, out, half = data.shape
    _same_shape(q, "scale", scale, (E, out, scale.shape[2]))
    if scale.shape[2] == 0 or 2 * half % scale.shape[2] or 2 * half // scale.shape[2] % 32:
        raise ValueError(
            f"a row of nf4 must be whole blocks of a multiple of 32 columns, but got {scale.shape[2]} blocks of "
            f"{2 * half} columns"
        )
    return E, out, 2 * half


def _decode_nf4(q: Quantized) -> torch.Tensor:
    assert q.scale is not None
    # Filled on the device: torch.tensor would copy from the host, which CUDA graphs refuse.
    table = torch.stack([torch.full((), code, dtype=torch.float32, device=q.device) for code in NF4_CODE])
    values = table[_nibbles(q.data, high_first=True).int()]
    return (values.unflatten(-1, (q.scale.shape[2], -1)) * q.scale[..., None]).flatten(-2)


FORMATS = MappingProxyType(
    {
        "mxfp4": Format(
            1,
            "data uint8 [E, out, in / 32, 16], scale uint8 (e8m0) [E, out, in / 32]",
            4.25,
            _check_mxfp4,
            _decode_mxfp4,
        ),
        "fp8_block": Format(
            2,
            "data float8_e4m3fn [E, out, in], scale float32 [E, out / 128, in / 128], or of joined parts "
            "[E, parts, out / parts / 128, in / 128]",
            8.002,
            _check_fp8,
            _decode_fp8,
        ),
        "int4": Format(
            3,
            "data int32 [E, out, in / 8], scale [E, out, groups], zero int32 [E, out / 8, groups] or None",
            4.5,
            _check_int4,
            _decode_int4,
        ),
        "q8_0": Format(4, "data uint8 [E, out, in / 32 * 34]", 8.5, _gguf(34, 32), _decode_q8_0),
        "q4_k": Format(5, "data uint8 [E, out, in / 256 * 144]", 4.5, _gguf(144, 256), _decode_q4_k),
        "q6_k": Format(6, "data uint8 [E, out, in / 256 * 210]", 6.5625, _gguf(210, 256), _decode_q6_k),
        "nf4": Format(
            7,
            "data uint8 [E, out, in / 2], scale float32 [E, out, in / blocksize]",
            4.5,
            _check_nf4,
            _decode_nf4,
        ),
    }
)
