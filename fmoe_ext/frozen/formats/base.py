"""Format: how a packed weight is checked, decoded and packed. Helpers that the files of formats share.

A weight [E, out, in] is packed as codes of a few bits (data) and scales that the columns of a block share: in a second
tensor (scale), or in the bytes of data (GGUF's formats). Two formats have a third tensor (zero: zero points of int4,
factors of nvfp4). A Format says which shapes these have (check), which values they stand for (decode) and how plain
rounding finds them (pack): quantized.py calls these three, rounding.py the methods of a Lattice.

The kernels read the same bytes by the same formula: csrc/gemm/decode.h on the CPU, 32 columns of a row at a time,
cuda/decode_packed.cu on a GPU. They round where decode() rounds, so all of them have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch

Shape: TypeAlias = tuple[int, int, int]
Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # data and scale
WithZero: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # and zero
# Scales to try, as multiples of the one that the largest magnitude of a block gives: a smaller one clips that value but
# fits the others better; a larger one moves the values between codes.
FACTORS = (1.0, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Packed(Protocol):
    """The part of fmoe_ext.frozen.Quantized, a packed weight, that a Format needs."""

    @property
    def format(self) -> str: ...
    @property
    def kind(self) -> Format: ...
    @property
    def data(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor | None: ...
    @property
    def zero(self) -> torch.Tensor | None: ...
    @property
    def device(self) -> torch.device: ...


class Format:
    """A format of packed weights; fmoe_ext.frozen.FORMATS has one object of each class."""

    number: int  # in csrc/gemm/packed.h
    tensors: str  # shapes of data, scale and zero, for errors
    bits: float  # per weight as quantize() packs it: codes and scales of blocks, not those of whole rows or matrices
    block: int  # columns that quantize() packs together
    has_integers = False  # products in integers, Quantized.int8_activations

    def check(self, q: Packed) -> Shape:
        """Return the shape of the decoded weight; ValueError for tensors that are not this format's."""
        raise NotImplementedError

    def decode(self, q: Packed) -> torch.Tensor:
        """Decode to float32 [E, out, in], gate and up as they lie."""
        raise NotImplementedError

    def pack(self, weight: torch.Tensor) -> Tensors | WithZero:
        """Round float32 [E, out, in] to the nearest values."""
        raise NotImplementedError

    def of_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        """View uint8 [E, out, bytes of a row] as data."""
        return rows

    def join_scale(self, scale: torch.Tensor, parts: int) -> torch.Tensor:
        """Turn the scales of blocks of rows that were packed one by one into the whole weight's."""
        return scale


class Fitted(Format):
    """A format whose scales pack() can choose by an importance of the values."""

    def pack(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> Tensors | WithZero:
        """Round float32 [E, out, in]; importance, of the same shape, weighs the squared errors of values."""
        raise NotImplementedError


class Grid(NamedTuple):
    """The values that a packed weight can take without another scale: step * values[i] - low, for code codes[i]."""

    values: torch.Tensor  # [n], increasing
    codes: torch.Tensor  # uint8 [n]
    step: torch.Tensor  # float32 [E, out, blocks of columns]
    low: torch.Tensor  # the same shape


class Lattice(Format):
    """A format that rounding.py can also round to by second moments of the inputs: its values lie on a Grid."""

    can_rescale = True  # False where scales are powers of two, so that no factor near 1 exists

    def grid(self, q: Packed) -> Grid:
        """Return the values that the scales of q allow."""
        raise NotImplementedError

    def recode(self, q: Packed, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes, uint8 [E, out, in], as data beside the scales of q."""
        raise NotImplementedError

    def rescale(self, q: Packed, factor: torch.Tensor) -> Tensors:
        """Multiply the values of each part of a row by its own factor [E, out, parts of a row] -> data and scale."""
        raise NotImplementedError


def require(q: Packed, name: str, dtypes: tuple[torch.dtype, ...], dims: int) -> torch.Tensor:
    """Return a tensor by its name; ValueError if it is missing or does not fit.

    It must have one of dtypes, dims dimensions, and the number of experts and the device of data.
    """
    t: torch.Tensor | None = getattr(q, name)
    if t is None:
        raise ValueError(f"{q.format} needs {name}: {q.kind.tensors}")
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


def refuse(q: Packed, *names: str) -> None:
    """Raise ValueError for tensors that the format does not have."""
    for name in names:
        if getattr(q, name) is not None:
            raise ValueError(f"{q.format} has no {name}, but got one: {q.kind.tensors}")


def same_shape(q: Packed, name: str, got: torch.Tensor, *expected: tuple[int, ...]) -> None:
    """Raise ValueError unless got has one of the expected shapes."""
    if tuple(got.shape) not in expected:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise ValueError(
            f"{name} must have shape {wanted} for {q.format} data {list(q.data.shape)}, but got {list(got.shape)}"
        )


def nibbles(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Unpack uint8 [..., n] -> [..., 2n] of 4 bits."""
    halves = (data >> 4, data & 15) if high_first else (data & 15, data >> 4)
    return torch.stack(halves, -1).flatten(-2)


def pairs(codes: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """Pack 4-bit codes [..., 2n] -> uint8 [..., n]."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return first << 4 | second if high_first else first | second << 4


def least_error(
    blocks: torch.Tensor,
    importance: torch.Tensor,
    scale: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    factors: Sequence[float] = FACTORS,
) -> torch.Tensor:
    """Choose for each block [..., n] the multiple of its scale [...] with the least sum of importance * error^2.

    rounded: scales [...] -> the values that the blocks become under them. Of equally good multiples the first of
    `factors` is taken, so the scale itself (1.0) if it is one of them.
    """
    found, least = scale, torch.full_like(scale, float("inf"))
    for factor in factors:
        other = scale * factor
        error = (importance * (rounded(other) - blocks).square()).sum(-1)
        found, least = torch.where(error < least, other, found), torch.minimum(error, least)
    return found


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Find the uint8 index of the nearest entry of an increasing table."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


def table_of(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Fill a float32 table on the device: torch.tensor would copy from the host, which CUDA graphs refuse."""
    return torch.stack([torch.full((), value, dtype=torch.float32, device=device) for value in values])
