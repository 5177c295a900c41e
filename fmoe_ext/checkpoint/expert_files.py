"""Places of the experts' weights in the files of a model, and the tensors that their bytes become."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

ALIGNED = 64  # bytes, a cache line
Weights: TypeAlias = tuple[Any, Any]  # w1 and w2: tensors [E, *, *]


class Span(NamedTuple):
    """Takes bytes of a file to a place in a buffer."""

    path: Path
    begin: int  # in the file
    num_bytes: int  # in the file
    at: int  # in the buffer
    # makes of these bytes, and of those of `beside`, what the buffer has from `at` on; None where they are the same
    turn: Callable[..., "np.ndarray[Any, Any]"] | None = None
    beside: tuple["Span", ...] = ()

    def moved(self, num_bytes: int) -> "Span":
        """Returns the same bytes of the file, for a place num_bytes later in the buffer."""
        return self._replace(at=self.at + num_bytes)


@dataclass(frozen=True)
class Part:
    """Describes one tensor of a layer's experts."""

    shape: tuple[int, ...]  # of one expert
    dtype: torch.dtype
    spans: tuple[tuple[Span, ...], ...]  # of each expert, places counted from its begin

    @cached_property
    def num_bytes(self) -> int:
        """Counts the bytes of one expert in a buffer."""
        return self.dtype.itemsize * int(np.prod(self.shape))

    def read(self, expert: int) -> torch.Tensor:
        """Reads one expert from the files [*shape]."""
        buffer = np.zeros(self.num_bytes, np.uint8)
        for span in self.spans[expert]:
            raw = [_bytes_of(one) for one in (span, *span.beside)]
            data = raw[0] if span.turn is None else span.turn(*raw).reshape(-1).view(np.uint8)
            buffer[span.at : span.at + data.size] = data
        return torch.from_numpy(buffer).view(self.dtype).view(self.shape)

    def cast(self, dtype: torch.dtype) -> "Part":
        """Returns the part whose values are cast to dtype while they are read."""
        if dtype == self.dtype:
            return self

        def moved(span: Span) -> Span:
            def turn(*raw: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
                data = raw[0] if span.turn is None else span.turn(*raw).reshape(-1).view(np.uint8)
                return torch.from_numpy(data).view(self.dtype).to(dtype).view(torch.uint8).numpy()

            return span._replace(at=span.at // self.dtype.itemsize * dtype.itemsize, turn=turn)

        return Part(self.shape, dtype, tuple(tuple(map(moved, of_expert)) for of_expert in self.spans))


@dataclass(frozen=True)
class Layer:
    """Describes the experts of one layer in the files."""

    path: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of w1 and w2, [E, *, *]
    parts: Mapping[str, Part]
    build: Callable[
        [Mapping[str, torch.Tensor]], Weights
    ]  # makes (w1, w2) of the parts' tensors [n, *part.shape]

    @property
    def is_packed(self) -> bool:
        """True for weights that are quantised, whose shapes are [E, out, in] whatever the module's are."""
        return "w1" not in self.parts

    def cast(self, dtype: torch.dtype) -> "Layer":
        """Returns the layer whose weights in a floating dtype are cast to another one while they are read.

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

    @cached_property
    def num_experts(self) -> int:
        return len(next(iter(self.parts.values())).spans)

    def num_bytes(self, num_experts: int) -> int:
        """Counts the bytes of a buffer for some number of experts."""
        return sum(_aligned(part.num_bytes * num_experts) for part in self.parts.values())

    def _begins(self, num_experts: int) -> Iterator[tuple[str, Part, int]]:
        begin = 0
        for name, part in self.parts.items():
            yield name, part, begin
            begin += _aligned(part.num_bytes * num_experts)

    def spans(self, experts: Sequence[int], slots: Sequence[int], num_slots: int) -> list[Span]:
        """Reads that bring experts to slots of a buffer for num_slots experts."""
        return [
            span.moved(begin + slot * part.num_bytes)
            for _, part, begin in self._begins(num_slots)
            for expert, slot in zip(experts, slots, strict=True)
            for span in part.spans[expert]
        ]

    def every_span(self) -> list[Span]:
        """The spans of all experts, with those beside them."""
        experts = range(self.num_experts)
        return [
            part for span in self.spans(experts, experts, self.num_experts) for part in (span, *span.beside)
        ]

    def weights(self, buffer: "np.ndarray[Any, Any]", num_slots: int) -> Weights:
        """w1 and w2 of the experts in the slots of a buffer, which lives as long as they do."""
        flat = torch.from_numpy(buffer)
        tensors = {}
        for name, part, begin in self._begins(num_slots):
            data = flat[begin : begin + part.num_bytes * num_slots]
            tensors[name] = data.view(part.dtype).view(num_slots, *part.shape)
        return self.build(tensors)


def _bytes_of(span: Span) -> "np.ndarray[Any, Any]":
    raw = np.fromfile(span.path, np.uint8, span.num_bytes, offset=span.begin)
    if raw.size != span.num_bytes:
        raise CheckpointError(f"{span.path} is damaged: it ends {span.num_bytes - raw.size} bytes too early")
    return raw


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED) * ALIGNED


def part_of(base: ModelFolder, shape: tuple[int, ...], names: Sequence[Sequence[str]]) -> Part:
    """The part [E, *shape] made of tensors: for each expert one after the other, or its slices of stacks [E, *]."""
    stored = [[base.tensors[name] for name in of_expert] for of_expert in names]
    dtype = stored[0][0].dtype
    num_experts = len(stored)
    is_stacked = len(stored[0][0].shape) == len(shape) + 1
    spans = []
    for e, tensors in enumerate(stored):
        at = 0
        of_expert: list[Span] = []
        for name, tensor in zip(names[e], tensors, strict=True):
            if tensor.dtype != dtype or tensor.shape != stored[0][len(of_expert)].shape:
                raise CheckpointError(
                    f"{base.folder}: {name} is {tensor.dtype} {list(tensor.shape)}, unlike the first expert's"
                )
            size = tensor.num_bytes // (num_experts if is_stacked else 1)
            path, begin = place_of(base, name, tensor)
            of_expert.append(Span(path, begin + (e * size if is_stacked else 0), size, at))
            at += size
        expected = dtype.itemsize * int(np.prod(shape))
        if at != expected:
            raise CheckpointError(
                f"{base.folder}: {names[e][0]} has {at} bytes of an expert, expected {expected}"
            )
        spans.append(tuple(of_expert))
    return Part(shape, dtype, tuple(spans))


def place_of(base: ModelFolder, name: str, tensor: StoredTensor) -> Any:
    """(file, offset) of a tensor."""
    if tensor.place is None:
        raise CheckpointError(f"{base.folder}: {name} is in no file")
    return tensor.place
