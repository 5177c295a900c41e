"""Describe the weights of a folder: each layer's experts as byte ranges of its files, all other tensors by name.

Streaming reads experts straight into buffers, so it needs places in files rather than tensors. A layer's experts have
two weights: w1 [E, gate rows before up rows, in] and w2 [E, out, in]. Where the files have gate and up apart, the spans
of both follow each other in the buffer, which joins them. A weight is made in one of four ways, depending on what the
files have; layer_of() takes one of the first three. Each ends in Parts whose spans say which bytes go where
(expert_files.py):

    plain          bytes are copied, or rearranged where the module has another order (_plain_part)
    packed         matrices that an operator decodes (methods/): bytes are copied or rearranged (_packed_part)
    decoded        any other packing, or several in one layer: float32, computed from the bytes (_decoded_part)
    MXFP4          GPT-OSS's own names: stacks of blocks and scales (mxfp4_layer)

outside_experts() has the other tensors. fmoe_ext/model_files.py, through which all readers get a model's files, calls
these. decode() makes a packed folder look like a plain one, for import_model(), adapters and `fmoe prune`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, Weights
from fmoe_ext.checkpoint.families import BLOCKS, FAMILIES
from fmoe_ext.checkpoint.methods import Decoded, Kind, Matrix, PackedTensor, kind_of
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

# For each expert its matrices (gate and up, or one); None for a plain one
Found: TypeAlias = Sequence[Sequence[Matrix | Decoded | None]]
MXFP4_STACKS = ("experts.gate_up_proj", "experts.down_proj")
_INTEGERS = (torch.int64, torch.int32, torch.bool)  # dtypes of buffers; packed weights may have them too


class InFiles(NamedTuple):
    """Names the plain tensors that make a weight of a layer's experts."""

    names: tuple[tuple[str, ...], ...]  # for each expert its matrices [out, in], whose rows follow each other
    is_stack: bool = False  # each name is a stack [E, *, *] instead, the same for every expert
    transposed: bool = False  # the module has [in, out] and the files [out, in], or the other way round
    interleaved: bool = False  # the files have rows gate, up, gate, up, ..., the module gate before up


def layer_of(
    base: ModelFolder, kind: Kind | None, path: str, weights: tuple[InFiles, InFiles]
) -> tuple[Layer, set[str]]:
    """Describe the experts at a path -> (the layer, names of its tensors). weights: of w1 and of w2.

    kind: kind_of(base). Raises CheckpointError for tensors that are missing or do not fit.
    """
    # Choose the way: an operator takes both weights packed, or none
    found = [
        [[_matrix(base, kind, name, weight.is_stack) for name in of_expert] for of_expert in weight.names]
        for weight in weights
    ]
    packed = [joined for of_weight in found if (joined := _joinable(of_weight)) is not None]
    is_packed = len(packed) == len(weights) and not any(weight.interleaved for weight in weights)
    is_plain = all(m is None for matrices in found for of_expert in matrices for m in of_expert)
    # {w1, w2: part}, or packed w1.data, w1.scale, w1.zero, w2.data, ...
    parts: dict[str, Part] = {}
    shapes: list[tuple[int, ...]] = []
    for i, (weight, matrices) in enumerate(zip(weights, found, strict=True)):
        name = f"w{i + 1}"
        if is_packed:
            first = packed[i][0][0]
            parts |= {f"{name}.{part}": _packed_part(base, part, packed[i]) for part in first.pieces}
            shapes.append((len(matrices), len(matrices[0]) * first.shape[0], first.shape[1]))
        else:
            parts[name] = _plain_part(base, weight) if is_plain else _decoded_part(base, weight, matrices)
            shapes.append((len(matrices), *parts[name].shape))

    def build(tensors: Mapping[str, torch.Tensor]) -> Weights:
        if not is_packed:
            return tensors["w1"], tensors["w2"]
        made = []
        for i, weight in enumerate(weights):
            begin = f"w{i + 1}."
            own = {name.removeprefix(begin): t for name, t in tensors.items() if name.startswith(begin)}
            format, count = packed[i][0][0].format, len(weight.names[0])
            made.append(
                frozen.Quantized.joined(format, own["data"], own.get("scale"), own.get("zero"), count)
            )
        return made[0], made[1]

    # Names that belong to the layer: its matrices, their scales and zero points, and biases of zeros
    used = set()
    beside = () if kind is None else (*kind.data, kind.scale, *kind.others)
    for name in {name for weight in weights for of_expert in weight.names for name in of_expert}:
        stem = name.removesuffix(".weight")
        used |= {name, *(stem + ending for ending in beside)}
        bias = f"{stem}.bias"
        if bias in base.tensors:
            if base.tensors[bias].read().any():  # GPTQ writes zeros
                raise CheckpointError(
                    f"{base.folder}: {bias} is a bias that is not zero: experts that are stored one by one "
                    "are read without biases"
                )
            used.add(bias)
    return Layer(path, (shapes[0], shapes[1]), parts, build), used & base.tensors.keys()


def _matrix(base: ModelFolder, kind: Kind | None, name: str, is_stack: bool) -> Matrix | Decoded | None:
    """Describe a matrix of one expert; None for a plain tensor."""
    stem = name.removesuffix(".weight")
    is_packed = kind is not None and kind.is_packed(base, stem)
    if name not in base.tensors and not is_packed:
        raise CheckpointError(f"{base.folder} lacks {name}")
    if is_stack and kind is not None and (is_packed or base.tensors[name].dtype not in FLOATS):
        raise CheckpointError(
            f"{base.folder}: {name} is a stack of packed experts, which can be read for MXFP4 only: unpack the experts "
            "one by one, or dequantise the model to bfloat16 first"
        )
    return kind.matrix(base, stem) if kind is not None and is_packed else None


def _joinable(found: Found) -> list[list[Matrix]] | None:
    """Return the matrices if an operator can take each expert's joined, as one matrix.

    None for other packings, for formats that differ, and where zero points of several matrices would share a word.
    """
    matrices = [[m for m in of_expert if isinstance(m, Matrix) and m.has_rows] for of_expert in found]
    if [len(m) for m in matrices] != [len(m) for m in found]:
        return None
    first = matrices[0][0]
    # int4 packs the zero points of eight rows in a word: the next matrix's would begin in the middle of one
    is_split = len(matrices[0]) > 1 and first.shape[0] % 8 and first.zeros_share_words
    is_one = all(m.format == first.format for of_expert in matrices for m in of_expert)
    return matrices if is_one and not is_split else None


def _plain_part(base: ModelFolder, weight: InFiles) -> Part:
    """Make the part [E, *, *] in the dtype of the files."""
    first = [base.tensors[name] for name in weight.names[0]]
    shapes = [tensor.shape[1:] if weight.is_stack else tensor.shape for tensor in first]
    for name, tensor, shape in zip(weight.names[0], first, shapes, strict=True):
        is_matrix = len(shape) == 2 and shape[1] == shapes[0][1]
        if not is_matrix or (weight.is_stack and tensor.shape[0] != len(weight.names)):
            expected = "a stack [E, *, *]" if weight.is_stack else "a matrix"
            raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {expected}")
    # all experts are slots of one tensor in the buffer, so each must be like the first
    for of_expert in weight.names:
        for name, like in zip(of_expert, first, strict=True):
            tensor = base.tensors[name]
            if (tensor.dtype, tensor.shape) != (first[0].dtype, like.shape):
                raise CheckpointError(
                    f"{base.folder}: {name} is {tensor.dtype} {list(tensor.shape)}, unlike the first expert's"
                )
    # In the module's order: bytes are copied. Otherwise they are rearranged while they are read
    if not weight.transposed and not weight.interleaved:
        return _part_of(base, (sum(shape[0] for shape in shapes), shapes[0][1]), weight.names)
    if first[0].dtype not in FLOATS:
        raise CheckpointError(
            f"{base.folder}: {weight.names[0][0]} is {first[0].dtype}, which is read only with scales and a "
            "quantization_config"
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
    """Make the part [E, *, *] in float32, which is decoded while it is read."""
    if weight.is_stack:
        raise CheckpointError(
            f"{base.folder}: {weight.names[0][0]} is a plain stack, but the other weight of its layer is packed: "
            "dequantise the model to bfloat16 first"
        )
    found: list[list[Decoded]] = []  # for each expert its matrices
    for names, of_expert in zip(weight.names, matrices, strict=True):
        found.append([])
        for name, matrix in zip(names, of_expert, strict=True):
            if matrix is not None:
                found[-1].append(matrix.decoded())
            else:  # one that was left in a floating dtype beside packed ones
                shape = base.tensors[name].shape
                if len(shape) != 2:
                    raise CheckpointError(f"{base.folder}: {name} is {list(shape)}, expected a matrix")
                found[-1].append(Decoded("plain", (shape[0], shape[1]), (name,), torch.Tensor.float))
        for one, first in zip(found[-1], found[0], strict=True):
            if one.shape != first.shape:
                raise CheckpointError(
                    f"{base.folder}: {one.names[0]} is {list(one.shape)}, unlike the first expert's "
                    f"{list(first.shape)}"
                )
    return _assembled(base, weight, found, torch.float32)


def _assembled(
    base: ModelFolder, weight: InFiles, matrices: Sequence[Sequence[Decoded]], dtype: torch.dtype
) -> Part:
    """Make the part of a weight whose experts are each computed from the bytes of several tensors, while read."""

    def turn_of(of_expert: Sequence[Decoded]) -> Callable[..., Any]:
        stored = [base.tensors[name] for matrix in of_expert for name in matrix.names]
        kinds = [(t.dtype, t.shape[1:] if weight.is_stack else t.shape) for t in stored]

        def turn(*raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            # bytes of the tensors -> bytes of the expert: decode, join, gate before up, transpose
            tensors = (
                torch.from_numpy(data).view(stored_dtype).reshape(shape)
                for data, (stored_dtype, shape) in zip(raw, kinds, strict=True)
            )
            values = torch.cat([m.values(*(next(tensors) for _ in m.names)) for m in of_expert]).to(dtype)
            if weight.interleaved:
                values = torch.cat((values[::2], values[1::2]))
            if weight.transposed:
                values = values.T
            return values.contiguous().view(torch.uint8).numpy()

        return turn

    # One span an expert: its first tensor, and the others beside it, whose bytes turn() gets too
    spans = []
    for e, of_expert in enumerate(matrices):
        sources = []
        for name in (name for matrix in of_expert for name in matrix.names):
            path, begin = _place_of(base, name)
            size = base.tensors[name].num_bytes // (len(matrices) if weight.is_stack else 1)
            sources.append(Span(path, begin + (e * size if weight.is_stack else 0), size, 0))
        spans.append((sources[0]._replace(turn=turn_of(of_expert), beside=tuple(sources[1:])),))
    rows, columns = sum(m.shape[0] for m in matrices[0]), matrices[0][0].shape[1]
    return Part((columns, rows) if weight.transposed else (rows, columns), dtype, tuple(spans))


def _packed_part(base: ModelFolder, part: str, matrices: Sequence[Sequence[Matrix]]) -> Part:
    """Make the part [E, rows of all projections, *]; CheckpointError for pieces that are unlike the first expert's.

    part: "data", "scale" or "zero" of frozen.Quantized.
    """
    first = matrices[0][0].pieces[part]
    # in the buffer, where the next projection's rows follow
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
            file, begin = _place_of(base, piece.name)
            of_one.append(Span(file, begin, base.tensors[piece.name].num_bytes, i * num_bytes, piece.turn))
        spans.append(tuple(of_one))
    # shape of one expert: rows of all its projections
    rows, columns = len(matrices[0]) * first.shape[0], first.shape[1]
    is_in_blocks = (matrices[0][0].format, part) == ("mxfp4", "data")  # as Quantized takes them
    shape = (rows, columns // 16, 16) if is_in_blocks else (rows, columns)
    return Part(shape, first.dtype, tuple(spans))


def _part_of(base: ModelFolder, shape: tuple[int, ...], names: Sequence[Sequence[str]]) -> Part:
    """Make the part [E, *shape] from each expert's tensors, one after the other, or from its slices of stacks."""
    stored = [[base.tensors[name] for name in of_expert] for of_expert in names]
    dtype = stored[0][0].dtype
    is_stacked = len(stored[0][0].shape) == len(shape) + 1
    spans = []
    for e, tensors in enumerate(stored):
        at = 0  # in the expert's bytes of the buffer
        of_expert: list[Span] = []
        for name, tensor in zip(names[e], tensors, strict=True):
            size = tensor.num_bytes // (len(stored) if is_stacked else 1)
            path, begin = _place_of(base, name)
            of_expert.append(Span(path, begin + (e * size if is_stacked else 0), size, at))
            at += size
        expected = dtype.itemsize * int(np.prod(shape))
        if at != expected:
            raise CheckpointError(
                f"{base.folder}: {names[e][0]} has {at} bytes of an expert, expected {expected}"
            )
        spans.append(tuple(of_expert))
    return Part(shape, dtype, tuple(spans))


def _place_of(base: ModelFolder, name: str) -> tuple[Path, int]:
    """Return (file, offset) of a tensor."""
    place = base.tensors[name].place
    if place is None:
        raise CheckpointError(f"{base.folder}: {name} has no place in a file: it is decoded when it is read")
    return place


def prefixes(path: str) -> Iterator[str]:
    """Yield the prefixes that files may have for the experts module at a path: the module's own name comes first."""
    stem, _, block = path.removesuffix(".experts").rpartition(".")
    for name in dict.fromkeys((block, *BLOCKS)):
        yield f"{stem}.{name}." if stem else f"{name}."


def mxfp4_layer(base: ModelFolder, path: str) -> tuple[Layer, set[str]] | None:
    """Describe a layer of MXFP4 experts: uint8 <name>_blocks [E, out, in / 32, 16], <name>_scales [E, out, in / 32].

    A block has 32 values of 4 bits in 16 bytes, and one scale. None if the folder has no such blocks. Raises
    CheckpointError for scales that are missing or do not fit.
    """
    prefix = next((p for p in prefixes(path) if f"{p}{MXFP4_STACKS[0]}_blocks" in base.tensors), None)
    if prefix is None:
        return None
    parts: dict[str, Part] = {}
    used = set()
    shapes = []
    # data and scales of w1, gate and up, and of w2, down
    for weight, stacked in zip(("w1", "w2"), MXFP4_STACKS, strict=True):
        blocks, scales = (f"{prefix}{stacked}_{kind}" for kind in ("blocks", "scales"))
        shape = _blocks_and_scales(base, f"{prefix}{stacked}")[0].shape
        for part, name in (("data", blocks), ("scale", scales)):
            parts[f"{weight}.{part}"] = _part_of(base, base.tensors[name].shape[1:], [[name]] * shape[0])
            used.add(name)
        shapes.append((shape[0], shape[1], shape[2] * 32))
    interleaved = f"{prefix}{MXFP4_STACKS[0]}_bias" in base.tensors  # GPT-OSS has gate and up in turn

    def build(tensors: Mapping[str, torch.Tensor]) -> Weights:
        return (
            frozen.Quantized("mxfp4", tensors["w1.data"], tensors["w1.scale"], None, interleaved),
            frozen.Quantized("mxfp4", tensors["w2.data"], tensors["w2.scale"]),
        )

    return Layer(path, (shapes[0], shapes[1]), parts, build), used


def _blocks_and_scales(base: ModelFolder, stem: str) -> tuple[StoredTensor, StoredTensor]:
    """Return a stack in MXFP4, <stem>_blocks and <stem>_scales; CheckpointError for what does not fit."""
    names = f"{stem}_blocks", f"{stem}_scales"
    for name in names:
        if name not in base.tensors:
            raise CheckpointError(f"{base.folder} lacks {name}")
    blocks, scales = (base.tensors[name] for name in names)
    if len(blocks.shape) != 4 or blocks.shape[3] != 16 or scales.shape != blocks.shape[:3]:
        raise CheckpointError(
            f"{base.folder}: {names[0]} {list(blocks.shape)} and {names[1]} {list(scales.shape)} do not fit: "
            "expected [E, out, in / 32, 16] and [E, out, in / 32]"
        )
    return blocks, scales


def outside_experts(
    base: ModelFolder, kind: Kind | None, used: Container[str], dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return {name: tensor} of a folder without those `used`; packed weights are decoded to dtype when they are read.

    kind: kind_of(base). A weight whose rows are packed one by one is a PackedTensor, which an operator can take as it
    is. Raises CheckpointError for formats that are not decoded.
    """
    tensors = base.tensors  # kept for later reads: decode() gives the base other ones

    def read(matrix: Matrix | Decoded) -> StoredTensor:
        if isinstance(matrix, Matrix) and matrix.has_rows:
            return PackedTensor(matrix.shape, dtype, lambda: matrix.packed(tensors))
        return StoredTensor(matrix.shape, dtype, lambda: matrix.decode(tensors, dtype))

    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name in used:
            continue
        # `stem`: the layer whose packed data this would be
        stem = None if kind is None else kind.stem_of(name)
        if kind is not None and stem is not None and kind.has(base, stem):
            # a packed weight, under the name that a plain model has; its scales are left out
            found[kind.plain_name(name)] = read(kind.matrix(base, stem))
        # scales and zero points, which matrix() has read with the weight
        elif kind is not None and kind.is_beside(name):
            continue
        elif tensor.dtype in FLOATS or (tensor.dtype in _INTEGERS and ".weight" not in name):
            found[name] = tensor
        else:
            raise CheckpointError(
                f"{base.folder}: {name} is {tensor.dtype}, packed in a format that is not decoded here: dequantise the "
                "model to bfloat16 first"
            )
    return found


def decode(base: ModelFolder) -> None:
    """Replace the packed weights of a folder by their values, in bfloat16 and under the names of a plain model.

    They are decoded when they are read, an expert at a time. base.packed names their format afterwards, and base.config
    has no quantization_config.
    """
    # GPT-OSS's MXFP4, under names of its own; modules have [E, in, out] where files have [E, out, in]
    family = FAMILIES.get(str(base.config.get("model_type", "")))
    turned = family is not None and family.files.interleaved
    for name in [name for name in base.tensors if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        base.tensors[stem] = _decoded_mxfp4(*_blocks_and_scales(base, stem), turned)
        del base.tensors[name], base.tensors[f"{stem}_scales"]
        # base.files lists the names by file: blocks and scales become one
        for names in base.files.values():
            if f"{stem}_scales" in names:
                names.remove(f"{stem}_scales")
            if name in names:
                names[names.index(name)] = stem
        base.packed = "mxfp4"
    # All other packings (methods/)
    kind = kind_of(base)
    if kind is not None:
        left = outside_experts(base, kind, (), torch.bfloat16)
        for names in base.files.values():
            # the scales of a weight may be in another file than the weight itself
            names[:] = [n for n in (kind.plain_name(name) for name in names) if n in left]
        base.tensors = left
        base.packed = base.quantization["quant_method"]
    if base.packed:
        base.config = {key: value for key, value in base.config.items() if key != "quantization_config"}
        base.quantization = {}


def _decoded_mxfp4(data: StoredTensor, scale: StoredTensor, turned: bool) -> StoredTensor:
    E, out, blocks = scale.shape
    shape = (E, blocks * 32, out) if turned else (E, out, blocks * 32)

    def rows(first: int, end: int) -> torch.Tensor:
        packed = frozen.Quantized("mxfp4", data.rows(first, end), scale.rows(first, end))
        weight = packed.dequantize(torch.bfloat16)
        return weight.mT.contiguous() if turned else weight

    def parts() -> Iterator[torch.Tensor]:
        return (rows(e, e + 1) for e in range(E))

    return StoredTensor(shape, torch.bfloat16, lambda: rows(0, E), rows, parts)
