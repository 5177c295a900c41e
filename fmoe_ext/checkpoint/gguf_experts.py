"""Experts in GGUF files: stacked tensors of all experts of a layer, in llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, Weights
from fmoe_ext.frozen.formats import GGUF

Tensors: TypeAlias = Mapping[str, torch.Tensor]
GGUF_FLOATS = MappingProxyType({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16})


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
    """{number of a layer: its experts} of an open GGUF file, in floating dtypes or types in frozen.FORMATS.

    Raises CheckpointError for other types, and for shapes that do not fit.
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
    parts: dict[str, Part] = {}
    formats, shapes = [], []
    for weight, roles in (("w1", ("gate", "up")), ("w2", ("down",))):
        tensors = []
        for role in roles:
            name = f"blk.{number}.ffn_{role}_exps.weight"
            if name not in found:
                raise CheckpointError(f"{path} lacks {name}")
            tensors.append(found[name])
        kind, size = tensors[0].tensor_type.name.lower(), [int(n) for n in tensors[0].shape]
        if kind not in (*GGUF, *GGUF_FLOATS):
            raise CheckpointError(
                f"{path}: {tensors[0].name} is {kind}, which is not computed here: requantise it to Q4_K"
            )
        columns, rows, num_experts = size
        if any(t.tensor_type != tensors[0].tensor_type or [int(n) for n in t.shape] != size for t in tensors):
            raise CheckpointError(f"{path}: gate and up of layer {number} have other types or shapes")
        num_bytes = int(tensors[0].n_bytes) // num_experts
        spans = tuple(
            tuple(
                Span(path, int(t.data_offset) + e * num_bytes, num_bytes, i * num_bytes)
                for i, t in enumerate(tensors)
            )
            for e in range(num_experts)
        )
        if (
            max(span.begin + span.num_bytes for of_expert in spans for span in of_expert)
            > path.stat().st_size
        ):
            raise CheckpointError(f"{path} is truncated: {tensors[-1].name} ends behind it")
        if kind in GGUF_FLOATS:
            parts[weight] = Part((len(roles) * rows, columns), GGUF_FLOATS[kind], spans)
        else:
            parts[f"{weight}.data"] = Part((len(roles) * rows, num_bytes // rows), torch.uint8, spans)
        formats.append(kind)
        shapes.append((num_experts, len(roles) * rows, columns))

    if (formats[0] in GGUF_FLOATS) != (formats[1] in GGUF_FLOATS):
        raise CheckpointError(
            f"{path}: experts of layer {number} are {formats[0]} and {formats[1]}; quantise both or neither"
        )

    def build(tensors: Tensors) -> Weights:
        if "w1" in tensors:
            return tensors["w1"], tensors["w2"]
        first, second = (frozen.Quantized(formats[i], tensors[f"w{i + 1}.data"]) for i in range(2))
        return first, second

    return Layer(f"blk.{number}", (shapes[0], shapes[1]), parts, build)
