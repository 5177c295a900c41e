"""Describe where the weights of experts are in files, and how their bytes fill a buffer: Layer, Part and Span.

expert_layers.py makes a Layer from safetensors files and gguf/reading.py from GGUF; finetune/streaming reads its spans.
A Layer has a few Parts: w1 and w2, or data, scale and zero of each. A Part has, for every expert, its Spans: bytes of a
file and where they go. A buffer for n experts has the parts one after the other, each with n slots:

    | w1: slot 0 | slot 1 | ... | slot n-1 | (to 64 bytes) | w2: slot 0 | slot 1 | ... | slot n-1 |

so each part of the buffer is a tensor [n, *shape] as it lies, and an operator can take it. Streaming reads spans into
slots in any order. Bytes that cannot be copied as they are go through a function (Span.turn).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS

ALIGNED = 64  # bytes, a cache line
Weights: TypeAlias = tuple[Any, Any]  # w1 and w2: tensors [E, *, *], or frozen.Quantized
Bytes: TypeAlias = "np.ndarray[Any, Any]"


class Span(NamedTuple):
    """A range of a file, and the place in a buffer to which its bytes go."""

    path: Path
    begin: int  # in the file
    num_bytes: int  # in the file
    at: int  # in the buffer
    # turn(these bytes, those of each span of `beside`) is what the buffer has from `at` on; None: copy the bytes
    turn: Callable[..., Bytes] | None = None
    beside: tuple["Span", ...] = ()

    def moved(self, num_bytes: int) -> "Span":
        """Return this span, placed num_bytes later in the buffer."""
        return self._replace(at=self.at + num_bytes)

    def turned(self, *raw: Bytes) -> Bytes:
        """Return what goes into the buffer, uint8 [n], for the bytes that were read."""
        return raw[0] if self.turn is None else self.turn(*raw).reshape(-1).view(np.uint8)


@dataclass(frozen=True)
class Part:
    """One tensor of a layer's experts, [E, *shape], in the files."""

    shape: tuple[int, ...]  # of one expert
    dtype: torch.dtype
    spans: tuple[tuple[Span, ...], ...]  # for each expert; places count from the start of its slot

    @cached_property
    def num_bytes(self) -> int:
        """Count the bytes of one expert in a buffer."""
        return self.dtype.itemsize * int(np.prod(self.shape))

    def read(self, expert: int) -> torch.Tensor:
        """Read one expert from the files -> [*shape]."""
        # As streaming does it, into a buffer for one expert
        buffer = np.zeros(self.num_bytes, np.uint8)
        for span in self.spans[expert]:
            raw = []
            for one in (span, *span.beside):
                raw.append(np.fromfile(one.path, np.uint8, one.num_bytes, offset=one.begin))
                if raw[-1].size != one.num_bytes:
                    missing = one.num_bytes - raw[-1].size
                    raise CheckpointError(f"{one.path} is damaged: it ends {missing} bytes too early")
            data = span.turned(*raw)
            buffer[span.at : span.at + data.size] = data
        return torch.from_numpy(buffer).view(self.dtype).view(self.shape)

    def cast(self, dtype: torch.dtype) -> "Part":
        """Return the part whose values are cast to dtype while they are read."""
        if dtype == self.dtype:
            return self

        def cast(span: Span) -> Span:
            def turn(*raw: Bytes) -> Bytes:
                values = torch.from_numpy(span.turned(*raw)).view(self.dtype)
                return values.to(dtype).view(torch.uint8).numpy()

            # the same element of a buffer in the other dtype
            return span._replace(at=span.at // self.dtype.itemsize * dtype.itemsize, turn=turn)

        return Part(self.shape, dtype, tuple(tuple(map(cast, of_expert)) for of_expert in self.spans))


@dataclass(frozen=True)
class Layer:
    """The experts of one layer in the files."""

    path: str  # of the experts module
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of w1 and w2, [E, *, *]
    parts: Mapping[str, Part]  # "w1" and "w2", or of packed weights "w1.data", "w1.scale", ...
    build: Callable[[Mapping[str, torch.Tensor]], Weights]  # the parts' tensors [n, *part.shape] -> w1, w2

    @property
    def is_packed(self) -> bool:
        """True for quantised weights; then the shapes are [E, out, in], whatever the module has."""
        return "w1" not in self.parts

    @cached_property
    def num_experts(self) -> int:
        return len(next(iter(self.parts.values())).spans)

    def cast(self, dtype: torch.dtype) -> "Layer":
        """Return the layer whose weights are cast to dtype as they are read; packed ones stay.

        Raises CheckpointError for weights that are numbers only together with scales.
        """
        if self.is_packed:
            return self
        for part in self.parts.values():
            if part.dtype not in FLOATS:
                raise CheckpointError(
                    f"{part.spans[0][0].path}: the experts of {self.path} are {part.dtype}, which needs scales, but "
                    "config.json has no quantization_config that says where they are"
                )
        return replace(self, parts={name: part.cast(dtype) for name, part in self.parts.items()})

    def _begins(self, num_slots: int) -> Iterator[tuple[str, Part, int]]:
        """Yield (name, part, where it begins in a buffer for num_slots experts)."""
        begin = 0
        for name, part in self.parts.items():
            yield name, part, begin
            begin += -(-part.num_bytes * num_slots // ALIGNED) * ALIGNED

    def num_bytes(self, num_slots: int) -> int:
        """Count the bytes of a buffer for num_slots experts."""
        return sum(-(-part.num_bytes * num_slots // ALIGNED) * ALIGNED for part in self.parts.values())

    def spans(self, experts: Sequence[int], slots: Sequence[int], num_slots: int) -> list[Span]:
        """Return the reads that bring experts to slots of a buffer for num_slots experts."""
        return [
            span.moved(begin + slot * part.num_bytes)
            for _, part, begin in self._begins(num_slots)
            for expert, slot in zip(experts, slots, strict=True)
            for span in part.spans[expert]
        ]

    def every_span(self) -> list[Span]:
        """Return the spans of all experts, with those beside them."""
        experts = range(self.num_experts)
        return [
            part for span in self.spans(experts, experts, self.num_experts) for part in (span, *span.beside)
        ]

    def weights(self, buffer: Bytes, num_slots: int) -> Weights:
        """Return w1 and w2 of the experts in the slots of a buffer, which lives as long as they do."""
        flat = torch.from_numpy(buffer)
        tensors = {}
        for name, part, begin in self._begins(num_slots):
            data = flat[begin : begin + part.num_bytes * num_slots]
            tensors[name] = data.view(part.dtype).view(num_slots, *part.shape)
        return self.build(tensors)
