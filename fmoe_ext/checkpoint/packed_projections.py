"""Packed experts whose projections are tensors of their own: FP8 blocks, compressed-tensors int4, NF4, GGUF files.

Gate and up of an expert are joined where they are read: their bytes follow each other in the buffer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch

from fmoe_ext import ops
from fmoe_ext.checkpoint.adapters.base import Base
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, Part, Span, part_of
from fmoe_ext.checkpoint.layouts import PER_EXPERT
from fmoe_ext.checkpoint.packed import mxfp4_layer, prefixes

Tensors: TypeAlias = Mapping[str, torch.Tensor]


class Kind(NamedTuple):
    """One format. data, scale, zero: what follows the projection's name; zero may be missing in a file.

    columns: of a weight in one element of data. check: raises CheckpointError for settings of quantization_config that
    are not computed.
    """

    format: str
    data: str
    scale: str
    zero: str
    columns: int
    check: Callable[[str, Mapping[str, Any]], None]


def packed_layer(base: Base, path: str) -> tuple[Layer, set[str]] | None:
    """(the layer of packed experts, names of its tensors); None if the folder has none at the path.

    path: of an experts module. Raises CheckpointError for tensors that are missing or do not fit, and for settings of
    quantization_config that are not computed.
    """
    found = mxfp4_layer(base, path)
    if found is not None:
        return found
    config = base.config.get("quantization_config") or {}
    kind = KINDS.get(config.get("quant_method", ""))
    if kind is None:
        return None
    for prefix in prefixes(path):
        for leaves in PER_EXPERT:
            stems = [leaf.removesuffix(".weight") for leaf in leaves]
            if f"{prefix}experts.0.{stems[0]}{kind.data}" in base.tensors:
                kind.check(str(base.folder), config)
                return _layer(base, path, prefix, stems, kind)
    return None


def _layer(base: Base, path: str, prefix: str, stems: Sequence[str], kind: Kind) -> tuple[Layer, set[str]]:
    num_experts = 0
    while f"{prefix}experts.{num_experts}.{stems[0]}{kind.data}" in base.tensors:
        num_experts += 1
    parts: dict[str, Part] = {}
    shapes = []
    for weight, joined in (("w1", stems[:2]), ("w2", stems[2:])):
        rows, columns = _matrix(base, f"{prefix}experts.0.{joined[0]}", kind)
        for part, suffix in (("data", kind.data), ("scale", kind.scale), ("zero", kind.zero)):
            first = f"{prefix}experts.0.{joined[0]}{suffix}"
            if not suffix or (part == "zero" and first not in base.tensors):
                continue
            names = [[f"{prefix}experts.{e}.{stem}{suffix}" for stem in joined] for e in range(num_experts)]
            _require(base, names)
            of_one = _rows_and_columns(base, first, part, kind, rows)
            parts[f"{weight}.{part}"] = part_of(base, (len(joined) * of_one[0], of_one[1]), names)
        if f"{weight}.zero" in parts and len(joined) == 2 and rows % 8:
            raise CheckpointError(
                f"{base.folder}: the zero points of {prefix}experts have {rows} rows for gate, which are no whole words"
            )
        shapes.append((num_experts, len(joined) * rows, columns))
    if shapes[1][1:] != (shapes[0][2], shapes[0][1] // 2):
        raise CheckpointError(f"{base.folder}: {prefix}experts have weights {shapes[0]} and {shapes[1]}")

    def build(tensors: Tensors) -> tuple[ops.Quantized, ops.Quantized]:
        first, second = (
            ops.Quantized(kind.format, t["data"], t.get("scale"), t.get("zero"))
            for t in (_of(tensors, "w1"), _of(tensors, "w2"))
        )
        return first, second

    used = {name for name in base.tensors if name.startswith(f"{prefix}experts.")}
    return Layer(path, (shapes[0], shapes[1]), parts, build), used


def _of(tensors: Tensors, weight: str) -> dict[str, torch.Tensor]:
    return {name.partition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{weight}.")}


def _require(base: Base, names: Sequence[Sequence[str]]) -> None:
    for of_expert in names:
        for name in of_expert:
            if name not in base.tensors:
                raise CheckpointError(f"{base.folder} lacks {name}")


def _matrix(base: Base, stem: str, kind: Kind) -> tuple[int, int]:
    """Rows and columns of the weight of a projection."""
    shape = base.tensors[stem + kind.data].shape
    if kind.format == "nf4":
        state = (
            bytes(base.tensors[stem + NF4_STATE].read().tolist()) if stem + NF4_STATE in base.tensors else b""
        )
        return _nf4_shape(base, stem, state)
    if len(shape) != 2:
        raise CheckpointError(f"{base.folder}: {stem}{kind.data} is {list(shape)}, expected two dimensions")
    return shape[0], shape[1] * kind.columns


def _rows_and_columns(base: Base, name: str, part: str, kind: Kind, rows: int) -> tuple[int, int]:
    """Shape that a tensor of a projection has in the joined one."""
    shape = base.tensors[name].shape
    if kind.format == "nf4":
        numel = 1
        for size in shape:
            numel *= size
        if numel % rows:
            raise CheckpointError(
                f"{base.folder}: {name} has {numel} values, no whole number for each of {rows} rows"
            )
        return rows, numel // rows
    if len(shape) != 2:
        raise CheckpointError(f"{base.folder}: {name} is {list(shape)}, expected two dimensions")
    return shape[0], shape[1]


NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"


def _nf4_shape(base: Base, stem: str, state: bytes) -> tuple[int, int]:
    if not state:
        raise CheckpointError(f"{base.folder} lacks {stem}{NF4_STATE}")
    try:
        values = json.loads(state)
        rows, columns = map(int, values["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{base.folder}: {stem}{NF4_STATE} is no quant_state: {error}") from error
    return rows, columns


def _refuse(folder: str, what: str) -> None:
    raise CheckpointError(
        f"{folder}: {what}, which is not computed here: dequantise the model to bfloat16 first"
    )


def _check_fp8(folder: str, config: Mapping[str, Any]) -> None:
    if list(config.get("weight_block_size") or ()) != [128, 128]:
        _refuse(folder, f"FP8 with weight_block_size {config.get('weight_block_size')} instead of [128, 128]")


def _check_compressed(folder: str, config: Mapping[str, Any]) -> None:
    if config.get("format") != "pack-quantized":
        _refuse(folder, f"compressed-tensors of format {config.get('format')!r} instead of 'pack-quantized'")
    for name, group in (config.get("config_groups") or {}).items():
        weights = (group or {}).get("weights") or {}
        if weights.get("num_bits") != 4 or weights.get("strategy") != "group":
            _refuse(
                folder,
                f"{name} with {weights.get('num_bits')} bits by {weights.get('strategy')} instead of 4 by group",
            )
        if weights.get("actorder") not in (None, False, "weight", "static"):
            _refuse(folder, f"{name} with actorder {weights.get('actorder')!r}")


def _check_bitsandbytes(folder: str, config: Mapping[str, Any]) -> None:
    if config.get("bnb_4bit_quant_type", "nf4") != "nf4" or not config.get("load_in_4bit", True):
        _refuse(folder, f"bitsandbytes of type {config.get('bnb_4bit_quant_type')!r} instead of 'nf4'")
    if config.get("bnb_4bit_use_double_quant"):
        _refuse(folder, "NF4 with bnb_4bit_use_double_quant (ops.nf4_scales decodes such scales)")


KINDS = MappingProxyType(
    {
        "fp8": Kind("fp8_block", ".weight", ".weight_scale_inv", "", 1, _check_fp8),
        "compressed-tensors": Kind(
            "int4", ".weight_packed", ".weight_scale", ".weight_zero_point", 8, _check_compressed
        ),
        "bitsandbytes": Kind("nf4", ".weight", ".weight.absmax", "", 2, _check_bitsandbytes),
    }
)


def gguf_layers(file: str | Path) -> dict[int, Layer]:
    """{number of a layer: its experts} of a GGUF file; types in ops.FORMATS only.

    Raises CheckpointError for a file that is none or is truncated, other types, and shapes that do not fit.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise CheckpointError("reading GGUF files needs gguf: pip install gguf") from error
    path = Path(file)
    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is no GGUF file, or truncated, or damaged: {error}") from error
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
        if kind not in ("q8_0", "q4_k", "q6_k"):
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
        parts[f"{weight}.data"] = Part((len(roles) * rows, num_bytes // rows), torch.uint8, spans)
        formats.append(kind)
        shapes.append((num_experts, len(roles) * rows, columns))

    def build(tensors: Tensors) -> tuple[ops.Quantized, ops.Quantized]:
        return ops.Quantized(formats[0], tensors["w1.data"]), ops.Quantized(formats[1], tensors["w2.data"])

    return Layer(f"blk.{number}", (shapes[0], shapes[1]), parts, build)
