"""Experts in GGUF files: stacked tensors of all experts of a layer, in llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, Weights
from fmoe_ext.frozen.formats import GGUF

Tensors: TypeAlias = Mapping[str, torch.Tensor]
_GGUF_FLOATS = MappingProxyType({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16})


def open_gguf(file: str | Path) -> Any:
    """The gguf package's reader of a file; CheckpointError for a file that is none or is truncated."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise CheckpointError("reading GGUF files needs gguf: pip install gguf") from error
    try:
        return GGUFReader(file)
    except (ValueError, OSError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{file} is no GGUF file, or truncated, or damaged: {error}") from error


def gguf_layers(file: str | Path, reader: Any) -> dict[int, Layer]:
    """{number of a layer: its experts} of an open GGUF file.

    Types that frozen.FORMATS does not have, and mixed ones, are decoded to float32 by the gguf package while they are
    read. Raises CheckpointError for types that it does not decode, and for shapes that do not fit.
    """
    path = Path(file)
    found = {t.name: t for t in reader.tensors}
    layers = {}
    for name in found:
        if name.startswith("blk.") and name.endswith(".ffn_down_exps.weight"):
            number = int(name.split(".")[1])
            layers[number] = _gguf_layer(path, number, found)
    return layers


def _gguf_layer(path: Path, number: int, found: Mapping[str, Any]) -> Layer:
    weights = []
    for roles in (("gate", "up"), ("down",)):
        names = [f"blk.{number}.ffn_{role}_exps.weight" for role in roles]
        for name in names:
            if name not in found:
                raise CheckpointError(f"{path} lacks {name}")
        weights.append([_Stack(path, found[name]) for name in names])
    for stacks in weights:
        if any(stack.shape != stacks[0].shape for stack in stacks):
            raise CheckpointError(f"{path}: gate and up of layer {number} have other shapes")
    kinds = [{stack.kind for stack in stacks} for stacks in weights]
    is_float = all(kind <= _GGUF_FLOATS.keys() and len(kind) == 1 for kind in kinds)
    is_packed = all(kind <= GGUF.keys() and len(kind) == 1 for kind in kinds)
    parts: dict[str, Part] = {}
    shapes = []
    for weight, stacks in zip(("w1", "w2"), weights, strict=True):
        num_experts, rows, columns = stacks[0].shape
        num_bytes = stacks[0].num_bytes
        shape = (len(stacks) * rows, columns)
        joined = tuple(
            tuple(stack.span(e, i * num_bytes) for i, stack in enumerate(stacks)) for e in range(num_experts)
        )
        if is_float:
            parts[weight] = Part(shape, _GGUF_FLOATS[stacks[0].kind], joined)
        elif is_packed:
            parts[f"{weight}.data"] = Part((shape[0], num_bytes // rows), torch.uint8, joined)
        else:
            for stack in stacks:
                stack.check_is_decoded()
            spans = (
                tuple(
                    stack.span(e, 4 * i * rows * columns)._replace(turn=stack.decode)
                    for i, stack in enumerate(stacks)
                )
                for e in range(num_experts)
            )
            parts[weight] = Part(shape, torch.float32, tuple(spans))
        shapes.append((num_experts, *shape))

    def build(tensors: Tensors) -> Weights:
        if not is_packed:
            return tensors["w1"], tensors["w2"]
        first, second = (
            frozen.Quantized(stacks[0].kind, tensors[f"w{i + 1}.data"]) for i, stacks in enumerate(weights)
        )
        return first, second

    return Layer(f"blk.{number}", (shapes[0], shapes[1]), parts, build)


class _Stack:
    """One projection of all experts. shape: [E, out, in]; num_bytes: of an expert."""

    def __init__(self, path: Path, tensor: Any) -> None:
        self.path, self.name, self.type = path, tensor.name, tensor.tensor_type
        self.kind = self.type.name.lower()
        self.begin = int(tensor.data_offset)
        size = [int(n) for n in reversed(tensor.shape)]
        if len(size) != 3:
            raise CheckpointError(f"{path}: {tensor.name} is {size}, expected [E, out, in]")
        self.shape = (size[0], size[1], size[2])
        self.num_bytes = int(tensor.n_bytes) // size[0]
        if self.begin + int(tensor.n_bytes) > path.stat().st_size:
            raise CheckpointError(f"{path} is truncated: {tensor.name} ends behind it")

    def span(self, expert: int, at: int) -> Span:
        return Span(self.path, self.begin + expert * self.num_bytes, self.num_bytes, at)

    def check_is_decoded(self) -> None:
        """CheckpointError for a type that the gguf package does not decode."""
        from gguf import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[self.type][1]), np.uint8), self.type)
        except (NotImplementedError, KeyError) as error:
            raise CheckpointError(
                f"{self.path}: {self.name} is {self.kind}, which the gguf package does not decode: requantise it to "
                "Q4_K"
            ) from error

    def decode(self, data: Any) -> Any:
        """float32 [out, in] of the bytes of an expert."""
        from gguf.quants import dequantize

        if self.kind in _GGUF_FLOATS:
            return torch.from_numpy(data).view(_GGUF_FLOATS[self.kind]).float().numpy()
        return np.ascontiguousarray(dequantize(data.reshape(self.shape[1], -1), self.type), dtype=np.float32)
