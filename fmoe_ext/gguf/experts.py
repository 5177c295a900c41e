"""Experts in GGUF files: stacked tensors of all experts of a layer, in llama.cpp's names."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, Weights
from fmoe_ext.checkpoint.families.family import Layout
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.packings import PIECES, SCALED, Piece, factors

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Bytes: TypeAlias = "np.ndarray[Any, Any]"
_GGUF_FLOATS = MappingProxyType({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16})


def gguf_layers(file: str | Path, reader: Any) -> dict[int, Layer]:
    """{number of a layer: its experts} of an open GGUF file.

    Types that frozen.FORMATS does not have, and mixed ones, are decoded to float32 by the gguf package while they are
    read. Raises CheckpointError for types that it does not decode, for shapes that do not fit, and for tensors of
    experts that are not known.
    """
    path = Path(file)
    found = {t.name: t for t in reader.tensors}
    # files have gate and up apart where modules have them in turn
    name = reader.architecture
    layout = next((kind().family.in_modules for kind in ARCHITECTURES if kind.name == name), Layout())
    layers = {}
    for name in found:
        if name.startswith("blk.") and name.endswith(".ffn_down_exps.weight"):
            number = int(name.split(".")[1])
            layers[number] = _gguf_layer(path, number, found, layout)
    return layers


def _stacks_of(path: Path, number: int, found: Mapping[str, Any], layout: Layout) -> list[list[_Stack]]:
    """Finds the projections of a layer: gate and up, or both as one, or up alone, and down."""
    gated, has_scales = layout.gated, layout.gate_scales is not None
    weights = []
    begin = f"blk.{number}.ffn_"
    is_fused = f"{begin}gate_up_exps.weight" in found
    apart = ("gate", "up") if gated else ("up",)
    for roles in (("gate_up",) if is_fused else apart, ("down",)):
        names = [f"{begin}{role}_exps.weight" for role in roles]
        for name in names:
            if name not in found:
                raise CheckpointError(f"{path} lacks {name}")
        weights.append([_Stack(found, name, has_scales) for name in names])
    if any(stack.shape != stacks[0].shape for stacks in weights for stack in stacks):
        raise CheckpointError(f"{path}: gate and up of layer {number} have other shapes")
    return weights


def _gguf_layer(path: Path, number: int, found: Mapping[str, Any], layout: Layout) -> Layer:
    in_turn = layout.interleaved
    weights = _stacks_of(path, number, found, layout)
    kinds = [{stack.kind for stack in stacks} for stacks in weights]
    # an operator takes one format a weight; llama.cpp's mixtures may have another one for gate than for up
    is_one = all(len(kind) == 1 for kind in kinds)
    is_float = is_one and not in_turn and all(kind <= _GGUF_FLOATS.keys() for kind in kinds)
    is_packed = is_one and all(kind <= PIECES.keys() for kind in kinds)
    parts: dict[str, Part] = {}
    shapes = []
    for weight, stacks in zip(("w1", "w2"), weights, strict=True):
        num_experts, rows, columns = stacks[0].shape
        shape = (len(stacks) * rows, columns)
        takes_turns = in_turn and weight == "w1"
        if is_float:
            spans = _as_they_lie(stacks, stacks[0].num_bytes)
            parts[weight] = Part(shape, _GGUF_FLOATS[stacks[0].kind], spans)
        elif is_packed:
            parts |= {f"{weight}.{name}": part for name, part in _pieces(stacks, takes_turns)}
        else:
            parts[weight] = _decoded(stacks, takes_turns, in_turn)
            shape = (columns, shape[0]) if in_turn else shape
        shapes.append((num_experts, *shape))

    def build(tensors: Tensors) -> Weights:
        if not is_packed:
            return tensors["w1"], tensors["w2"]
        first, second = (
            frozen.Quantized(
                stacks[0].kind,
                tensors[f"{weight}.data"],
                tensors.get(f"{weight}.scale"),
                tensors.get(f"{weight}.zero"),
                in_turn and weight == "w1",
            )
            for weight, stacks in zip(("w1", "w2"), weights, strict=True)
        )
        return first, second

    return Layer(f"blk.{number}", (shapes[0], shapes[1]), parts, build)


def _as_they_lie(stacks: Sequence[_Stack], num_bytes: int) -> tuple[tuple[Span, ...], ...]:
    experts = range(stacks[0].shape[0])
    return tuple(tuple(stack.span(e, i * num_bytes) for i, stack in enumerate(stacks)) for e in experts)


def _pieces(stacks: Sequence[_Stack], takes_turns: bool) -> Iterator[tuple[str, Part]]:
    """(tensor of Quantized, part) of stacks that stay packed. takes_turns: of their rows, as GPT-OSS has them."""
    first = stacks[0]
    num_experts, rows, _ = first.shape
    pieces = PIECES[first.kind]
    for name, piece in pieces.items():
        example = piece(torch.zeros(1, first.num_bytes // rows, dtype=torch.uint8, device="cpu"))
        shape = (len(stacks) * rows, *example.shape[1:])
        if len(pieces) == 1 and not takes_turns:
            yield name, Part(shape, torch.uint8, _as_they_lie(stacks, first.num_bytes))
            continue
        # bound now: a span is read later, when the loop is at another piece
        turn = functools.partial(_turned, piece, rows, takes_turns)
        spans = []
        for e in range(num_experts):
            own, *beside = (stack.span(e, 0) for stack in stacks)
            spans.append((own._replace(turn=turn, beside=tuple(beside)),))
        yield name, Part(shape, torch.uint8, tuple(spans))
    if first.kind == SCALED:
        of_experts = tuple(
            tuple(stack.factor(e, i * 8 * rows) for i, stack in enumerate(stacks)) for e in range(num_experts)
        )
        yield "zero", Part((len(stacks) * rows, 2), torch.float32, of_experts)


def _turned(piece: Piece, rows: int, takes_turns: bool, *raw: Bytes) -> Bytes:
    found = torch.cat([piece(torch.from_numpy(data).view(rows, -1)) for data in raw])
    return (_gates_in_turn(found) if takes_turns else found).contiguous().numpy()


def _decoded(stacks: Sequence[_Stack], takes_turns: bool, transposed: bool) -> Part:
    """Makes the part in float32, decoded while it is read."""
    num_experts, rows, columns = stacks[0].shape
    for stack in stacks:
        stack.check_is_decoded()
    num_raw = [len(stack.sources(0)) for stack in stacks]

    def turn(*raw: Bytes) -> Bytes:
        given = iter(raw)
        values = torch.cat(
            [
                torch.from_numpy(stack.decode(*(next(given) for _ in range(count))))
                for stack, count in zip(stacks, num_raw, strict=True)
            ]
        )
        values = _gates_in_turn(values) if takes_turns else values
        return (values.T if transposed else values).contiguous().numpy()

    spans = []
    for e in range(num_experts):
        own, *beside = (span for stack in stacks for span in stack.sources(e))
        spans.append((own._replace(turn=turn, beside=tuple(beside)),))
    shape = (len(stacks) * rows, columns)
    return Part(shape[::-1] if transposed else shape, torch.float32, tuple(spans))


def _gates_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Rows [2 * n, *], gates before ups, -> gate, up, gate, up, ..."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


class _Stack:
    """One projection of all experts. shape: [E, out, in]; num_bytes: of an expert; scale: its factors, or None.

    has_scales: factors of weights that are not packed in NVFP4 belong to the router, which multiplies by them.
    """

    def __init__(self, found: Mapping[str, Any], name: str, has_scales: bool = False) -> None:
        tensor = found[name]
        self.path, self.name, self.type = tensor.path, name, tensor.tensor_type
        self.kind = self.type.name.lower()
        self.begin = int(tensor.data_offset)
        size = [int(n) for n in reversed(tensor.shape)]
        if len(size) != 3:
            raise CheckpointError(f"{self.path}: {tensor.name} is {size}, expected [E, out, in]")
        self.shape = (size[0], size[1], size[2])
        self.num_bytes = int(tensor.n_bytes) // size[0]
        if self.begin + int(tensor.n_bytes) > self.path.stat().st_size:
            raise CheckpointError(f"{self.path} is truncated: {tensor.name} ends behind it")
        self.scale = found.get(f"{name.removesuffix('weight')}scale")
        if has_scales and self.kind != SCALED:
            self.scale = None
        if self.scale is not None:
            check_factors(self.scale.path, self.scale, self.kind, size[0])

    def span(self, expert: int, at: int) -> Span:
        return Span(self.path, self.begin + expert * self.num_bytes, self.num_bytes, at)

    def sources(self, expert: int) -> tuple[Span, ...]:
        """Spans of the bytes of an expert, then of its factor if it has one."""
        if self.scale is None:
            return (self.span(expert, 0),)
        return self.span(expert, 0), Span(self.scale.path, int(self.scale.data_offset) + 4 * expert, 4, 0)

    def factor(self, expert: int, at: int) -> Span:
        """Reads the factors [out, 2] of NVFP4."""
        rows, is_one = self.shape[1], self.scale is None
        source = self.span(expert, 0)._replace(num_bytes=4) if is_one else self.sources(expert)[1]

        def turn(raw: Bytes) -> Bytes:
            value = torch.ones(1, device="cpu") if is_one else torch.from_numpy(raw).view(torch.float32)
            return factors(value, rows).contiguous().numpy()

        return source._replace(at=at, turn=turn)

    def check_is_decoded(self) -> None:
        """Raises CheckpointError for a type that the gguf package does not decode."""
        from gguf import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[self.type][1]), np.uint8), self.type)
        except (NotImplementedError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: {self.name} is {self.kind}, which the gguf package does not decode: requantise it to "
                "Q4_K"
            ) from error

    def decode(self, data: Bytes, factor: Bytes | None = None) -> Bytes:
        """float32 [out, in] of the bytes of an expert, and of its factor."""
        from gguf.quants import dequantize

        if self.kind in _GGUF_FLOATS:
            floats = torch.from_numpy(data).view(_GGUF_FLOATS[self.kind]).float()
            return floats.view(self.shape[1:]).numpy()
        values = dequantize(data.reshape(self.shape[1], -1), self.type)
        return np.ascontiguousarray(
            values if factor is None else values * factor.view(np.float32), dtype=np.float32
        )


def check_factors(path: Path, scale: Any, kind: str, count: int) -> None:
    """Raises CheckpointError for factors of a weight that are not computed with, or not `count` in float32."""
    if kind != SCALED:
        raise CheckpointError(f"{path}: {scale.name} scales a weight in {kind}, which is not computed here")
    if scale.tensor_type.name != "F32" or int(scale.n_elements) != count:
        raise CheckpointError(
            f"{path}: {scale.name} is {scale.tensor_type.name} {list(map(int, scale.shape))}, expected F32 [{count}]"
        )
