"""Quantized: a frozen weight of all experts in a format that models are published in; quantize() packs one by rounding.

A Quantized has the tensors as the file has them. Its format (formats/) checks them and says what they stand for;
operators take them as bytes, rows(), beside packing(), which of_rows() turns back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fmoe_ext.frozen.formats import FORMATS, Format
from fmoe_ext.frozen.formats.base import Fitted, Shape

# Added to the number of a format where operators may compute in integers, as in csrc/frozen_weight.h.
_INTEGERS = 64
# formats for which quantize() takes an importance
FITTED = tuple(name for name, kind in FORMATS.items() if isinstance(kind, Fitted))


@dataclass(frozen=True, eq=False)  # equal to itself alone: to compare the tensors has no one answer
class Quantized:
    """A weight [E, out, in] of all experts, packed as its file has it. The first dimension of each tensor is E.

    interleaved: operators take b1 and lora1.b in the order of the rows too, and compute with all gates before all ups.
    int8_activations: for q8_0 and q4_k on the CPU, rows that the weight multiplies may be rounded to 8 bits and the
    products be of integers, where that is faster and no gradients are recorded. Never in float64 or batch_invariant(),
    nor for more rows an expert than 32 with AVX-512, 64 with VNNI, 16 in bfloat16 with AVX512_BF16. A value of x then
    errs by up to 1/254 of the largest in its block of 32 (q4_k: 256) columns, as in llama.cpp.
    Raises ValueError for an unknown format, missing tensors, other dtypes or shapes, int8_activations of other formats.
    """

    format: str  # a name in FORMATS, which says what the three tensors are
    data: torch.Tensor
    scale: torch.Tensor | None = None  # None where blocks of data hold their scales
    zero: torch.Tensor | None = None  # zero points of int4; of nvfp4 the factors of its scales
    interleaved: bool = False  # rows are gate, up, gate, up, ..., as GPT-OSS has them
    int8_activations: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f'unknown format "{self.format}": known are {", ".join(FORMATS)}')
        shape = self.kind.check(self)
        if self.interleaved and shape[1] % 2:
            raise ValueError(f"interleaved rows must be an even number, but got {shape[1]}")
        if self.int8_activations and not self.kind.has_integers:
            known = " and ".join(name for name, kind in FORMATS.items() if kind.has_integers)
            raise ValueError(f"int8_activations is for the formats {known}, but got {self.format}")
        object.__setattr__(self, "_shape", shape)

    @property
    def kind(self) -> Format:
        """Return the Format."""
        return FORMATS[self.format]

    @property
    def shape(self) -> Shape:
        """Return (E, out, in) of the decoded weight."""
        return self._shape  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Count the bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.zero) if t is not None)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Quantized":
        """Apply a function to each tensor: to slice the experts, or to move them to another device."""
        scale, zero = (None if t is None else function(t) for t in (self.scale, self.zero))
        return Quantized(
            self.format, function(self.data), scale, zero, self.interleaved, self.int8_activations
        )

    @cached_property
    def in_int8(self) -> "Quantized":
        """Return the weight with int8_activations; itself if its format has no such products."""
        return replace(self, int8_activations=True) if self.kind.has_integers else self

    @staticmethod
    def joined(
        format: str, data: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, parts: int
    ) -> "Quantized":
        """Make one weight of parts that were packed apart and whose rows follow each other: gate and up, say."""
        if scale is not None:
            scale = FORMATS[format].join_scale(scale, parts)
        return Quantized(format, data, scale, zero)

    def rows(self) -> torch.Tensor:
        """Return data as bytes, uint8 [E, out, bytes of a row]: a view, or a copy if data is not contiguous."""
        # such a copy is not kept, as data may be written to later
        return self._rows if self.data.is_contiguous() else _rows_of(self.data)

    @cached_property
    def _rows(self) -> torch.Tensor:
        # kept, as a view costs as much time as a short product; not of inference mode, as a backward may save it
        with torch.inference_mode(False):
            return _rows_of(self.data)

    def packing(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int, bool]:
        """Return scale, zero, number of the format, interleaved: what operators take beside rows()."""
        scale = self.scale
        # kPackedLayouts (csrc/gemm/packed.h) has both as bytes
        if scale is not None and scale.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn):
            scale = scale.view(torch.uint8)
        number = self.kind.number
        if self.int8_activations and self.data.device.type == "cpu" and not torch.is_grad_enabled():
            number += _INTEGERS
        return scale, self.zero, number, self.interleaved

    @staticmethod
    def of_rows(
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None,
        number: int,
        interleaved: bool = False,
    ) -> "Quantized":
        """Make a weight from what rows() and packing() returned."""
        has_integers = number >= _INTEGERS
        name = next(name for name, kind in FORMATS.items() if kind.number == number % _INTEGERS)
        return Quantized(name, FORMATS[name].of_bytes(rows), scale, zero, interleaved, has_integers)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode the weight [E, out, in] in float32 and round it to dtype; gates before ups if interleaved."""
        weight = self.kind.decode(self).to(dtype)
        return gates_first(weight) if self.interleaved else weight


def _rows_of(data: torch.Tensor) -> torch.Tensor:
    return data.flatten(2).contiguous().view(torch.uint8)


def gates_first(rows: torch.Tensor) -> torch.Tensor:
    """Reorder dimension 1 from gate, up, gate, up, ... to all gates, then all ups."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def quantize(weight: torch.Tensor, format: str, importance: torch.Tensor | None = None) -> Quantized:
    """Round a weight [E, out, in] to the nearest values of a format, a name in FORMATS.

    Each scale comes from the largest magnitude of its block, in q4_k and q5_k from its least and largest value. int4
    has groups of 32, symmetric; nf4 blocks of 64, without nested scales. GGUF's formats keep scales in float16, so a
    block whose scale rounds to 0 there becomes zeros, as in llama.cpp: below 1e-4 in q6_k, 4e-6 in q8_0.
    importance: of each value, float that broadcasts to the weight, as [E, 1, in] for the mean square of each input.
    Several scales are then tried, and each block takes the one with the least sum of importance * error^2, which is
    never more than without an importance. For mxfp4, nvfp4, nf4 and q4_k.
    Raises ValueError for an unknown format, for rows that are no whole blocks, for values that are not finite or whose
    scales float16 does not hold, and for an importance of other formats or shapes, or with negative numbers.

    Example:

        >>> packed = quantize(torch.randn(4, 16, 32), "mxfp4")
        >>> packed.dequantize(torch.float32).shape
        torch.Size([4, 16, 32])
    """
    if format not in FORMATS:
        raise ValueError(f'unknown format "{format}": known are {", ".join(FORMATS)}')
    if weight.dim() != 3:
        raise ValueError(f"weight must have shape [E, out, in], but got {list(weight.shape)}")
    kind = FORMATS[format]
    if weight.shape[2] % kind.block:
        raise ValueError(
            f"rows of {format} must be whole blocks of {kind.block}, but got shape {list(weight.shape)}"
        )
    # plain rounding, or scales by an importance
    values = weight.detach().float()
    # a meta tensor has no values: writers ask for the shapes of the result
    if values.numel() and not values.is_meta and not torch.stack(values.aminmax()).isfinite().all():
        raise ValueError("weight must be finite, but it has infinities or NaN")
    if importance is None:
        return Quantized(format, *kind.pack(values))
    if not isinstance(kind, Fitted):
        raise ValueError(f"{format} leaves no choice to an importance: {', '.join(FITTED)} do")
    if not bool((importance >= 0).all()):
        raise ValueError("an importance must be 0 or more everywhere")
    try:
        of_values = importance.to(values.device, torch.float32).expand(weight.shape)
    except RuntimeError:
        raise ValueError(
            f"importance must broadcast to {list(weight.shape)}, but got {list(importance.shape)}"
        ) from None
    return Quantized(format, *kind.pack(values, of_values))
