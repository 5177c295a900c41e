"""Format, the record of a format of packed weights, and helpers that the files of formats share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

Shape: TypeAlias = tuple[int, int, int]
Tensors: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]  # data and scale
WithZero: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # and zero
# Of the scale that a block's largest magnitude gives: smaller ones clip it, and come nearer to the others
FACTORS = (1.0, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Packed(Protocol):
    """A packed weight, as a fmoe_ext.frozen.Quantized is one."""

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


class Grid(NamedTuple):
    """The values that a packed weight can take without another scale: step * values[i] - low, for code codes[i]."""

    values: torch.Tensor  # [n], increasing
    codes: torch.Tensor  # uint8 [n]
    step: torch.Tensor  # float32 [E, out, blocks of columns]
    low: torch.Tensor  # the same shape


@dataclass(frozen=True)
class Format:
    """A format of packed weights, one of fmoe_ext.frozen.FORMATS."""

    number: int  # in csrc/gemm/packed.h
    tensors: str  # shapes of data, scale and zero
    bits: float  # of a weight, scales included; not what a whole row has
    block: int  # columns that quantize() packs together
    check: Callable[[Packed], Shape]  # -> shape of the decoded weight; ValueError for other tensors
    decode: Callable[[Packed], torch.Tensor]  # -> float32 [E, out, in], gate and up as they lie
    # of float32 [E, out, in]; with is_fitted also of an importance of that shape, which weighs the errors of values
    pack: Callable[..., Tensors | WithZero]
    # uint8 [E, out, bytes of a row] -> data
    of_bytes: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
    # scales of parts that were packed apart -> those of the whole
    join_scale: Callable[[torch.Tensor, int], torch.Tensor] = lambda scale, parts: scale
    is_fitted: bool = False  # scales leave a choice, which pack() makes by an importance
    has_integers: bool = False  # products in integers, Quantized.int8_activations
    # For rounding by second moments (rounding.py); None where a format is only packed by plain rounding.
    grid: Callable[[Packed], Grid] | None = None
    recode: Callable[[Packed, torch.Tensor], torch.Tensor] | None = None  # codes uint8 [E, out, in] -> data
    # factors [E, out, parts of a row] of all values of a part -> data and scale; None where scales are powers of two
    rescale: Callable[[Packed, torch.Tensor], Tensors] | None = None


def require(q: Packed, name: str, dtypes: tuple[torch.dtype, ...], dims: int) -> torch.Tensor:
    """Return a tensor by its name; ValueError if it is missing or of another dtype, number of dimensions or device."""
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
    """Choose for each block [..., n] the multiple of its scale [...] with the least importance * error^2.

    rounded: values that the blocks become under other scales. The first of equal ones, the scale itself, is taken.
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
