"""The experts of a layer, made of the tensors of a folder: as they lie, as an operator decodes them, or decoded.

Projections that are tensors of their own are joined where they are read: their bytes follow each other in the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, part_of, place_of
from fmoe_ext.checkpoint.methods import Decoded, Kind, Matrix, decoded, kind_of, plain
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Matrices: TypeAlias = Sequence[Sequence[Matrix]]  # of each expert
Found: TypeAlias = Sequence[Sequence[Matrix | Decoded | None]]  # None for plain ones


class InFiles(NamedTuple):
    """Names the plain tensors that make a weight of a layer's experts."""

    names: tuple[tuple[str, ...], ...]  # of each expert's matrices [out, in], whose rows follow each other
    is_stack: bool = False  # each is [E, *, *] instead, and the same for every expert
    transposed: bool = False  # the module has [in, out] and the files [out, in], or the other way round
    interleaved: bool = False  # rows of gate and up are in turn in the files alone


def layer_of(base: ModelFolder, path: str, weights: tuple[InFiles, InFiles]) -> tuple[Layer, set[str]]:
    """(the layer of experts at a path, names of its tensors). weights: up, with gate before it if it has one, and down.

    Raises CheckpointError for tensors that are missing or do not fit, and for settings of quantization_config that are
    not computed.
    """
    kind = kind_of(base)
    found = [
        [[_matrix(base, kind, name, weight.is_stack) for name in of_expert] for of_expert in weight.names]
        for weight in weights
    ]
    flat = [m for matrices in found for of_expert in matrices for m in of_expert]
    packed = [joined for of_weight in found if (joined := _joinable(of_weight)) is not None]
    is_packed = len(packed) == len(weights) and not any(weight.interleaved for weight in weights)
    parts: dict[str, Part] = {}
    shapes: list[tuple[int, ...]] = []
    for i, (weight, matrices) in enumerate(zip(weights, found, strict=True)):
        name = f"w{i + 1}"
        if is_packed:
            first = packed[i][0][0]
            parts |= {f"{name}.{part}": _packed_part(base, part, packed[i]) for part in first.pieces}
            shapes.append((len(matrices), len(matrices[0]) * first.shape[0], first.shape[1]))
            continue
        if all(m is None for m in flat):
            parts[name] = _plain_part(base, weight)
        else:
            parts[name] = _decoded_part(base, weight, matrices)
        shapes.append((len(matrices), *parts[name].shape))
    formats = [matrices[0][0].format for matrices in packed]
    counts = [len(weight.names[0]) for weight in weights]

    def build(
        tensors: Tensors,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[frozen.Quantized, frozen.Quantized]:
        if not is_packed:
            return tensors["w1"], tensors["w2"]
        first, second = (
            frozen.Quantized.joined(name, t["data"], t.get("scale"), t.get("zero"), count)
            for name, t, count in zip(formats, (_of(tensors, "w1"), _of(tensors, "w2")), counts, strict=True)
        )
        return first, second

    return Layer(path, (shapes[0], shapes[1]), parts, build), _used(base, kind, weights)


def _of(tensors: Tensors, weight: str) -> dict[str, torch.Tensor]:
    return {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{weight}.")}


def _matrix(base: ModelFolder, kind: Kind | None, name: str, is_stack: bool) -> Matrix | Decoded | None:
    stem = name.removesuffix(".weight")
    is_packed = kind is not None and kind.is_packed(base, stem)
    if name not in base.tensors and not is_packed:
        raise CheckpointError(f"{base.folder} lacks {name}")
    if is_stack and kind is not None and (is_packed or base.tensors[name].dtype not in FLOATS):
        raise CheckpointError(
            f"{base.folder}: {name} is a stack of packed experts, which is read of MXFP4 alone: unpack the experts "
            "one by one, or dequantise the model to bfloat16 first"
        )
    if kind is None or not is_packed:
        return None
    found: Matrix | Decoded = kind.matrix(base, stem)
    return found


def _joinable(found: Found) -> Matrices | None:
    """Returns the matrices that an operator decodes, if it can take them joined.

    None for others, for formats that differ, and where zero points of several matrices would share a word.
    """
    matrices = [[m for m in of_expert if isinstance(m, Matrix) and m.has_rows] for of_expert in found]
    if [len(m) for m in matrices] != [len(m) for m in found]:
        return None
    first = matrices[0][0]
    is_split = len(matrices[0]) > 1 and first.shape[0] % 8 and first.zeros_share_words
    is_one = all(m.format == first.format for of_expert in matrices for m in of_expert)
    return matrices if is_one and not is_split else None


def _used(base: ModelFolder, kind: Kind | None, weights: Sequence[InFiles]) -> set[str]:
    """Names the tensors of a layer's experts; CheckpointError for a bias that is not zero (GPTQ writes zeros)."""
    used = set()
    beside = () if kind is None else (*kind.data, kind.scale, *kind.others)
    for name in {name for weight in weights for of_expert in weight.names for name in of_expert}:
        stem = name.removesuffix(".weight")
        used |= {name, *(stem + ending for ending in beside)}
        bias = f"{stem}.bias"
        if bias in base.tensors:
            if base.tensors[bias].read().any():
                raise CheckpointError(
                    f"{base.folder}: {bias} is a bias, which experts in files of their own have not"
                )
            used.add(bias)
    return used & base.tensors.keys()


def _plain_part(base: ModelFolder, weight: InFiles) -> Part:
    """Makes the part [E, *, *] in the dtype of the files."""
    first = [base.tensors[name] for name in weight.names[0]]
    shapes = [tensor.shape[1:] if weight.is_stack else tensor.shape for tensor in first]
    for name, tensor, shape in zip(weight.names[0], first, shapes, strict=True):
        if (
            len(shape) != 2
            or shape[1] != shapes[0][1]
            or (weight.is_stack and tensor.shape[0] != len(weight.names))
        ):
            expected = "a stack [E, *, *]" if weight.is_stack else "a matrix"
            raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {expected}")
    if not weight.transposed and not weight.interleaved:
        return part_of(base, (sum(shape[0] for shape in shapes), shapes[0][1]), weight.names)
    if first[0].dtype not in FLOATS:
        raise CheckpointError(
            f"{base.folder}: {weight.names[0][0]} is {first[0].dtype}, packed without scales"
        )
    kept = [
        [
            Decoded("plain", (shape[0], shape[1]), (name,), lambda t: t)
            for name, shape in zip(of_expert, shapes, strict=True)
        ]
        for of_expert in weight.names
    ]
    return _assembled(base, weight, kept, first[0].dtype)


def _decoded_part(base: ModelFolder, weight: InFiles, matrices: Found) -> Part:
    """Makes the part [E, *, *] in float32, decoded while it is read."""
    if weight.is_stack:
        raise CheckpointError(
            f"{base.folder}: {weight.names[0][0]} is plain, but other experts of its layer are packed"
        )
    found = [
        [plain(base, name) if m is None else decoded(m) for name, m in zip(names, of_expert, strict=True)]
        for names, of_expert in zip(weight.names, matrices, strict=True)
    ]
    for of_expert in found:
        for matrix, first in zip(of_expert, found[0], strict=True):
            if matrix.shape != first.shape:
                raise CheckpointError(
                    f"{base.folder}: {matrix.names[0]} is {list(matrix.shape)}, unlike the first expert's "
                    f"{list(first.shape)}"
                )
    return _assembled(base, weight, found, torch.float32)


def _assembled(
    base: ModelFolder, weight: InFiles, matrices: Sequence[Sequence[Decoded]], dtype: torch.dtype
) -> Part:
    rows, columns = sum(m.shape[0] for m in matrices[0]), matrices[0][0].shape[1]
    spans = []
    for e, of_expert in enumerate(matrices):
        sources = []
        for name in (name for matrix in of_expert for name in matrix.names):
            path, begin = place_of(base, name, base.tensors[name])
            size = base.tensors[name].num_bytes // (len(matrices) if weight.is_stack else 1)
            sources.append(Span(path, begin + (e * size if weight.is_stack else 0), size, 0))
        turn = _turn(base, weight, of_expert, dtype)
        spans.append((sources[0]._replace(turn=turn, beside=tuple(sources[1:])),))
    return Part((columns, rows) if weight.transposed else (rows, columns), dtype, tuple(spans))


def _turn(
    base: ModelFolder, weight: InFiles, of_expert: Sequence[Decoded], dtype: torch.dtype
) -> Callable[..., np.ndarray]:  # type: ignore[type-arg]
    """Makes the weight of an expert of the bytes of all its tensors."""
    found = [base.tensors[name] for matrix in of_expert for name in matrix.names]
    kinds = [(t.dtype, t.shape[1:] if weight.is_stack else t.shape) for t in found]

    def turn(*raw: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        tensors = (
            torch.from_numpy(data).view(dtype).reshape(shape)
            for data, (dtype, shape) in zip(raw, kinds, strict=True)
        )
        values = torch.cat([m.values(*(next(tensors) for _ in m.names)) for m in of_expert]).to(dtype)
        if weight.interleaved:
            values = torch.cat((values[::2], values[1::2]))
        if weight.transposed:
            values = values.T
        return values.contiguous().view(torch.uint8).numpy()

    return turn


def _packed_part(base: ModelFolder, part: str, matrices: Sequence[Sequence[Matrix]]) -> Part:
    """Makes the part [E, rows of all projections, *]; CheckpointError for pieces that are unlike the first expert's."""
    first = matrices[0][0].pieces[part]
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
    rows, columns = len(matrices[0]) * first.shape[0], first.shape[1]
    is_in_blocks = (matrices[0][0].format, part) == ("mxfp4", "data")  # as Quantized takes them
    shape = (rows, columns // 16, 16) if is_in_blocks else (rows, columns)
    return Part(shape, first.dtype, tuple(spans))
