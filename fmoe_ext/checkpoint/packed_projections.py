"""Packed experts whose projections are tensors of their own, in safetensors files.

Gate and up of an expert are joined where they are read: their bytes follow each other in the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, place_of
from fmoe_ext.checkpoint.layouts import PER_EXPERT
from fmoe_ext.checkpoint.methods import Kind, Matrix, kind_of
from fmoe_ext.checkpoint.model_folder import Base
from fmoe_ext.checkpoint.packed import mxfp4_layer, prefixes

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def packed_layer(base: Base, path: str) -> tuple[Layer, set[str]] | None:
    """(the layer of packed experts, names of its tensors); None if the folder has none at the path.

    path: of an experts module. Raises CheckpointError for tensors that are missing or do not fit, and for settings of
    quantization_config that are not computed.
    """
    found = mxfp4_layer(base, path)
    if found is not None:
        return found
    kind = kind_of(base)
    if kind is None:
        return None
    for prefix in prefixes(path):
        for leaves in PER_EXPERT:
            stems = [leaf.removesuffix(".weight") for leaf in leaves]
            if kind.is_packed(base, f"{prefix}experts.0.{stems[0]}"):
                return _layer(base, path, prefix, stems, kind)
    return None


def _layer(base: Base, path: str, prefix: str, stems: Sequence[str], kind: Kind) -> tuple[Layer, set[str]]:
    num_experts = 0
    while f"{prefix}experts.{num_experts}.{stems[0]}{kind.data}" in base.tensors:
        num_experts += 1
    parts: dict[str, Part] = {}
    shapes, formats = [], []
    for weight, joined in (("w1", stems[:2]), ("w2", stems[2:])):
        matrices = [
            [kind.matrix(base, f"{prefix}experts.{e}.{stem}") for stem in joined] for e in range(num_experts)
        ]
        first = matrices[0][0]
        rows, columns = first.shape
        for part in first.pieces:
            parts[f"{weight}.{part}"] = _part(base, part, matrices)
        if "zero" in first.pieces and len(joined) == 2 and rows % 8:
            raise CheckpointError(
                f"{base.folder}: the zero points of {prefix}experts have {rows} rows for gate, which are no whole words"
            )
        shapes.append((num_experts, len(joined) * rows, columns))
        formats.append(first.format)
    if shapes[1][1:] != (shapes[0][2], shapes[0][1] // 2):
        raise CheckpointError(f"{base.folder}: {prefix}experts have weights {shapes[0]} and {shapes[1]}")

    def build(tensors: Tensors) -> tuple[frozen.Quantized, frozen.Quantized]:
        first, second = (
            frozen.Quantized.joined(name, t["data"], t.get("scale"), t.get("zero"), parts)
            for name, t, parts in zip(formats, (_of(tensors, "w1"), _of(tensors, "w2")), (2, 1), strict=True)
        )
        return first, second

    used = {name for name in base.tensors if name.startswith(f"{prefix}experts.")}
    for name in sorted(used):  # GPTQ writes biases of zeros
        if name.endswith(".bias") and base.tensors[name].read().any():
            raise CheckpointError(
                f"{base.folder}: {name} is a bias, which packed experts of this kind have not"
            )
    return Layer(path, (shapes[0], shapes[1]), parts, build), used


def _of(tensors: Tensors, weight: str) -> dict[str, torch.Tensor]:
    return {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{weight}.")}


def _part(base: Base, part: str, matrices: Sequence[Sequence[Matrix]]) -> Part:
    """The part [E, rows of all projections, *]; CheckpointError for pieces that are unlike the first expert's."""
    first = matrices[0][0].pieces[part]
    if not matrices[0][0].has_rows:
        raise CheckpointError(f"{base.folder}: {first.name} has no whole blocks for each row")
    num_bytes = first.shape[0] * first.shape[1] * first.dtype.itemsize
    spans = []
    for of_expert in matrices:
        of_one = []
        for i, matrix in enumerate(of_expert):
            piece = matrix.pieces.get(part)
            if piece is None or (piece.shape, piece.dtype) != (first.shape, first.dtype):
                wrong = "missing" if piece is None else f"{piece.dtype} {list(piece.shape)}"
                name = matrix.pieces["data"].name if piece is None else piece.name
                raise CheckpointError(
                    f"{base.folder}: {part} of {name} is {wrong}, unlike the first expert's"
                )
            file, begin = place_of(base, piece.name, base.tensors[piece.name])
            of_one.append(Span(file, begin, base.tensors[piece.name].num_bytes, i * num_bytes, piece.turn))
        spans.append(tuple(of_one))
    return Part((len(matrices[0]) * first.shape[0], first.shape[1]), first.dtype, tuple(spans))
