"""Read a GGUF file's tensors as Transformers has them: experts as byte ranges, every other tensor by name.

llama.cpp stacks the experts of a layer: one tensor for each projection, [E, out, in], with gate and up apart or joined.
gguf_layers() describes them as Parts (expert_files.py), in one of three ways:

    floats    all f32, f16 or bf16: bytes as they lie
    packed    w1 of one type, w2 of one type, and kernels compute with both: bytes as they lie, or codes and scales
              taken apart (packings.py)
    decoded   all others, as mixtures, and GPT-OSS in floats: float32, by the package gguf, while they are read

outside_experts() has the other tensors. They go through the architecture's TensorTransform, and stay packed where that
only moves rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, Weights
from fmoe_ext.checkpoint.families.family import Layout
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.file import GgufFile
from fmoe_ext.gguf.metadata import FREQUENCIES, architecture_of, own_fields
from fmoe_ext.gguf.packings import PIECES, SCALED, Piece, factors, packed
from fmoe_ext.gguf.transforms import TensorTransform

Bytes: TypeAlias = "np.ndarray[Any, Any]"
_FLOATS = MappingProxyType({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16})
# Tensors that gguf_layers() reads: stacked weights, and their factors in NVFP4
_OF_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.(weight|scale)")


def gguf_layers(file: GgufFile) -> dict[int, Layer]:
    """Return {number of a layer: its experts}, for layers that have some.

    Raises CheckpointError for types that the package gguf does not decode, for shapes that do not fit, and for a
    projection that is missing.
    """
    found = {t.name: t for t in file.tensors}
    name = file.architecture
    layout = next((kind().family.in_modules for kind in ARCHITECTURES if kind.name == name), Layout())
    matches = map(re.compile(r"blk\.(\d+)\.ffn_down_exps\.weight", re.ASCII).fullmatch, found)
    numbers = [int(match[1]) for match in matches if match]
    return {number: _layer(file.path, number, found, layout) for number in numbers}


def _layer(path: Path, number: int, found: Mapping[str, Any], layout: Layout) -> Layer:
    # The stacks of w1 (gate and up, both as one, or up alone) and of w2 (down)
    begin = f"blk.{number}.ffn_"
    apart = ("gate", "up") if layout.gated else ("up",)
    is_fused = f"{begin}gate_up_exps.weight" in found
    weights: dict[str, list[_Stack]] = {}
    for weight, roles in (("w1", ("gate_up",) if is_fused else apart), ("w2", ("down",))):
        names = [f"{begin}{role}_exps.weight" for role in roles]
        for name in names:
            if name not in found:
                raise CheckpointError(f"{path} lacks {name}")
        # Gemma 4's router multiplies experts by factors of the same name: they are the weight's in NVFP4 alone
        weights[weight] = [_Stack(found, name, layout.gate_scales is not None) for name in names]
    if any(stack.shape != stacks[0].shape for stacks in weights.values() for stack in stacks):
        raise CheckpointError(f"{path}: gate and up of layer {number} have other shapes")
    kinds = [{stack.kind for stack in stacks} for stacks in weights.values()]
    # Choose the way. An operator takes one format a weight; llama.cpp's mixtures may have gate and up in different ones
    is_one = all(len(kind) == 1 for kind in kinds)
    # GPT-OSS's module has rows gate, up, gate, up, ..., and [in, out] where it is not packed
    in_turn = layout.interleaved
    is_float = is_one and not in_turn and all(kind <= _FLOATS.keys() for kind in kinds)
    is_packed = is_one and all(kind <= PIECES.keys() for kind in kinds)
    parts: dict[str, Part] = {}
    shapes = []
    for weight, stacks in weights.items():
        num_experts, rows, columns = stacks[0].shape
        shape = (len(stacks) * rows, columns)
        takes_turns = in_turn and weight == "w1"
        if is_float:
            parts[weight] = Part(shape, _FLOATS[stacks[0].kind], _as_they_lie(stacks))
        elif is_packed:
            parts |= {f"{weight}.{name}": part for name, part in _pieces(stacks, takes_turns).items()}
        else:
            parts[weight] = _decoded_part(stacks, takes_turns, in_turn)
            shape = (columns, shape[0]) if in_turn else shape
        shapes.append((num_experts, *shape))

    def build(tensors: Mapping[str, torch.Tensor]) -> Weights:
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
            for weight, stacks in weights.items()
        )
        return first, second

    return Layer(f"blk.{number}", (shapes[0], shapes[1]), parts, build)


class _Stack:
    """One projection of all experts, a tensor [E, out, in] of the file."""

    shape: tuple[int, int, int]  # [E, out, in]
    num_bytes: int  # of an expert
    scale: Any  # the tensor of its factors, of NVFP4; None without

    def __init__(self, found: Mapping[str, Any], name: str, has_scales: bool) -> None:
        """has_scales: the router has factors under the name of NVFP4's."""
        tensor = found[name]
        self.path, self.name, self.type = tensor.path, name, tensor.tensor_type
        self.kind = self.type.name.lower()
        self.begin = int(tensor.data_offset)
        size = [int(n) for n in reversed(tensor.shape)]  # GGUF has the fastest dimension first
        if len(size) != 3:
            raise CheckpointError(f"{self.path}: {tensor.name} is {size}, expected [E, out, in]")
        self.shape = (size[0], size[1], size[2])
        # experts follow each other in the tensor
        self.num_bytes = int(tensor.n_bytes) // size[0]
        if self.begin + int(tensor.n_bytes) > self.path.stat().st_size:
            raise CheckpointError(f"{self.path} is truncated: {tensor.name} ends behind it")
        self.scale = found.get(f"{name.removesuffix('weight')}scale")
        if has_scales and self.kind != SCALED:
            self.scale = None
        if self.scale is not None:
            _check_factors(self.scale.path, self.scale, self.kind, size[0])

    def span(self, expert: int, at: int) -> Span:
        return Span(self.path, self.begin + expert * self.num_bytes, self.num_bytes, at)

    def sources(self, expert: int) -> tuple[Span, ...]:
        """Return the spans of the bytes of an expert, then of its factor if it has one."""
        if self.scale is None:
            return (self.span(expert, 0),)
        return self.span(expert, 0), Span(self.scale.path, int(self.scale.data_offset) + 4 * expert, 4, 0)

    def factor(self, expert: int, at: int) -> Span:
        """Return the span that makes NVFP4's factors [out, 2] of an expert, from its one number in the file."""
        rows, is_one = self.shape[1], self.scale is None
        # without a number in the file the factors are ones; a span needs bytes, so it reads any four
        source = self.span(expert, 0)._replace(num_bytes=4) if is_one else self.sources(expert)[1]

        def turn(raw: Bytes) -> Bytes:
            value = torch.ones(1, device="cpu") if is_one else torch.from_numpy(raw).view(torch.float32)
            return factors(value, rows).contiguous().numpy()

        return source._replace(at=at, turn=turn)

    def decode(self, data: Bytes, factor: Bytes | None = None) -> Bytes:
        """Decode the bytes of an expert, and of its factor -> float32 [out, in]."""
        from gguf.quants import dequantize

        if self.kind in _FLOATS:
            floats = torch.from_numpy(data).view(_FLOATS[self.kind]).float()
            return floats.view(self.shape[1:]).numpy()
        values = dequantize(data.reshape(self.shape[1], -1), self.type)
        return np.ascontiguousarray(
            values if factor is None else values * factor.view(np.float32), dtype=np.float32
        )


def _as_they_lie(stacks: Sequence[_Stack]) -> tuple[tuple[Span, ...], ...]:
    size = stacks[0].num_bytes
    return tuple(
        tuple(stack.span(e, i * size) for i, stack in enumerate(stacks)) for e in range(stacks[0].shape[0])
    )


def _pieces(stacks: Sequence[_Stack], takes_turns: bool) -> dict[str, Part]:
    """Return {tensor of Quantized: part} of stacks that stay packed. takes_turns: rows gate, up, gate, up, ...

    A Part's spans say how an expert's bytes in the file become those of data, scale or zero in the buffer.
    """
    first = stacks[0]
    num_experts, rows, _ = first.shape
    pieces = PIECES[first.kind]
    parts = {}

    def turn(piece: Piece, *raw: Bytes) -> Bytes:
        found = torch.cat([piece(torch.from_numpy(data).view(rows, -1)) for data in raw])
        return (_gates_in_turn(found) if takes_turns else found).contiguous().numpy()

    for name, piece in pieces.items():
        # one row of zeros, to see the shape that a row of this piece has
        example = piece(torch.zeros(1, first.num_bytes // rows, dtype=torch.uint8, device="cpu"))
        spans: list[tuple[Span, ...]] = []
        if len(pieces) == 1 and not takes_turns:
            spans += _as_they_lie(stacks)
        else:
            for e in range(num_experts):
                own, *beside = (stack.span(e, 0) for stack in stacks)
                spans.append((own._replace(turn=functools.partial(turn, piece), beside=tuple(beside)),))
        parts[name] = Part((len(stacks) * rows, *example.shape[1:]), torch.uint8, tuple(spans))
    if first.kind == SCALED:  # two float32 a row
        of_experts = tuple(
            tuple(stack.factor(e, i * 8 * rows) for i, stack in enumerate(stacks)) for e in range(num_experts)
        )
        parts["zero"] = Part((len(stacks) * rows, 2), torch.float32, of_experts)
    return parts


def _decoded_part(stacks: Sequence[_Stack], takes_turns: bool, transposed: bool) -> Part:
    """Make the part in float32, decoded while it is read; CheckpointError for types that gguf does not decode."""
    # Try one block of each type now: the error must not come in the middle of a run
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for stack in stacks:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[stack.type][1]), np.uint8), stack.type)
        except (NotImplementedError, KeyError) as error:
            raise CheckpointError(
                f"{stack.path}: {stack.name} is {stack.kind}, which the gguf package does not decode: requantise it to "
                "Q4_K"
            ) from error
    # how many of the byte ranges that turn() gets are each stack's: one, or two with a factor
    num_raw = [len(stack.sources(0)) for stack in stacks]

    def turn(*raw: Bytes) -> Bytes:
        given = iter(raw)
        of_stacks = [
            torch.from_numpy(stack.decode(*(next(given) for _ in range(count))))
            for stack, count in zip(stacks, num_raw, strict=True)
        ]
        values = torch.cat(of_stacks)
        values = _gates_in_turn(values) if takes_turns else values
        return (values.T if transposed else values).contiguous().numpy()

    num_experts, rows, columns = stacks[0].shape
    spans = []
    for e in range(num_experts):
        own, *beside = (span for stack in stacks for span in stack.sources(e))
        spans.append((own._replace(turn=turn, beside=tuple(beside)),))
    shape = (len(stacks) * rows, columns)
    return Part(shape[::-1] if transposed else shape, torch.float32, tuple(spans))


def _gates_in_turn(rows: torch.Tensor) -> torch.Tensor:
    """Rearrange rows [2 * n, *], gates before ups, -> gate, up, gate, up, ..."""
    return rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


def _check_factors(path: Path, scale: Any, kind: str, count: int) -> None:
    """Raise CheckpointError unless factors are `count` numbers in float32 of a weight in NVFP4."""
    if kind != SCALED:
        raise CheckpointError(f"{path}: {scale.name} scales a weight in {kind}, which is not computed here")
    if scale.tensor_type.name != "F32" or int(scale.n_elements) != count:
        raise CheckpointError(
            f"{path}: {scale.name} is {scale.tensor_type.name} {list(map(int, scale.shape))}, expected F32 [{count}]"
        )


def outside_experts(
    file: GgufFile, config: Any, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return {name in Transformers: tensor} of all but the experts; a PackedTensor if a kernel decodes its type.

    shapes: {name: shape} of the configuration's parameters and buffers. Heads for the tokens after the next are left
    out. Raises CheckpointError for a tensor of the file that the model lacks or has in another shape, and for a tensor
    of several parts of which some are missing.
    """
    architecture, path = architecture_of(file, config), file.path
    if architecture.model_type != config.model_type:
        raise CheckpointError(
            f"{path}: general.architecture is {file.architecture}, but config.json has {config.model_type}"
        )
    # for tensors that are not packed: some parameters stay in float32 in a model of 16 bits
    wide = torch.promote_types(dtype, torch.float32)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    transforms = architecture.tensors(config, shapes)
    taken = {part for transform in transforms.values() for part in transform.parts}
    # Factors of weights in NVFP4
    scales = {}  # {weight outside of the experts: its factor}
    for name, tensor in tensors.items():
        weight = tensors.get(f"{name.removesuffix('scale')}weight") if name.endswith(".scale") else None
        if weight is not None and name not in taken and not _OF_EXPERTS.fullmatch(name):
            _check_factors(path, tensor, weight.tensor_type.name.lower(), 1)
            scales[weight.name] = tensor
    # Each parameter of the model, from its parts in the file
    found, used = {}, {FREQUENCIES, *(factor.name for factor in scales.values())}
    for name, transform in transforms.items():
        # parts of the tensor in the file; experts are gguf_layers()'s
        parts = [tensors[part] for part in transform.parts if part in tensors]
        first = transform.parts[0]
        weight = (
            tensors.get(f"{first.removesuffix('scale')}weight") if first.endswith("_exps.scale") else None
        )
        if weight is not None and weight.tensor_type.name.lower() == SCALED:
            # Gemma 4's router has factors under this name. With weights in NVFP4 the name is taken by theirs, and the
            # router's are ones
            ones = torch.ones(int(weight.shape[-1]), dtype=wide, device="cpu")
            found[name] = StoredTensor(shapes[name], wide, ones.clone)
        elif parts and not all(part.name.endswith("_exps.weight") for part in parts):
            for part in transform.parts:
                if part not in tensors:
                    raise CheckpointError(f"{path} lacks {part}")
            factors_of = [scales[part] for part in transform.parts if part in scales]
            found[name] = _stored(path, parts, transform, factors_of, dtype, wide)
            used.update(transform.parts)
            if tuple(found[name].shape) != shapes[name]:
                raise CheckpointError(
                    f"{path}: {name} is {list(found[name].shape)} in the file, but {list(shapes[name])} by its metadata"
                )
    # No tensor of the file may be left over: the model would compute something else
    is_cut = architecture.num_mtp_blocks(own_fields(architecture, file.values()))
    for name in tensors.keys() - used:
        # but heads, which are blocks behind the last layer
        number = int(name.split(".")[1]) if re.match(r"blk\.\d+\.", name) else -1
        is_head = is_cut and number >= config.num_hidden_layers
        # and input_scale, for programs that round inputs
        if not is_head and not name.endswith(".input_scale") and not _OF_EXPERTS.fullmatch(name):
            raise CheckpointError(
                f"{path}: {name} has no name in Transformers' {config.model_type} of this configuration"
            )
    return found


def _stored(
    path: Path,
    parts: list[Any],
    transform: TensorTransform,
    factors: list[Any],
    dtype: torch.dtype,
    wide: torch.dtype,
) -> StoredTensor:
    """Make a tensor of its parts in the file, read when it is used, and packed if a kernel decodes its type."""
    shapes = [tuple(int(n) for n in reversed(part.shape)) for part in parts]
    try:
        # on the meta device: parts that do not fit raise before values are read
        shape = tuple(transform.read(*(torch.empty(s, device="meta") for s in shapes)).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {', '.join(transform.parts)} do not fit the metadata: {error}"
        ) from error
    kinds = {part.tensor_type.name.lower() for part in parts}
    # only whole rows may move: a block of packed values does not cross rows
    is_packed = transform.has_rows and kinds <= PIECES.keys() and len(kinds) == 1
    if factors and not (is_packed and len(parts) == 1):
        raise CheckpointError(f"{path}: {factors[0].name} scales a weight whose values are rearranged")

    def read_packed() -> frozen.Quantized:
        # a copy in memory, whatever becomes of the file
        rows = transform.read(*(torch.from_numpy(part.data.copy()) for part in parts))
        factor = torch.from_numpy(factors[0].data.copy()) if factors else None
        return packed(next(iter(kinds)), rows, factor)

    def read() -> torch.Tensor:
        from gguf.quants import dequantize

        values = []
        for part in parts:
            try:
                values.append(torch.from_numpy(dequantize(part.data, part.tensor_type).copy()))
            except (NotImplementedError, ValueError) as error:
                raise CheckpointError(f"{path}: {part.name} cannot be decoded: {error}") from error
        return transform.read(*values).to(wide)

    if is_packed and all(len(s) == 2 for s in shapes):
        return PackedTensor(shape, dtype, read_packed)
    return StoredTensor(shape, wide, read)
