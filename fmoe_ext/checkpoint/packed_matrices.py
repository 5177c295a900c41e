"""Matrices in packed formats, as published files name and lay them out: experts' projections and other linear layers.

A format that an operator does not decode as it lies is turned into one that it does, with the same values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS, Base
from fmoe_ext.checkpoint.packed_options import refusals
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.turning import Turn, awq_words, awq_zeros, gptq_zeros, nested_scales, transposed

FP8_BLOCK = 128


class Piece(NamedTuple):
    """A tensor of a packed matrix: its name in the files, and what frozen.Quantized takes of it.

    turn: makes that of the tensor in the file; None where it is the same.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    turn: Turn | None = None


class Matrix(NamedTuple):
    """A packed matrix [rows, columns]. pieces: {"data", "scale", and "zero" where there are zero points}."""

    format: str
    shape: tuple[int, int]
    pieces: dict[str, Piece]

    def packed(self, tensors: Mapping[str, StoredTensor]) -> frozen.Quantized:
        """Its bytes, read now from the tensors of a folder, as a weight of one expert."""
        parts = {part: _read(tensors[piece.name], piece)[None] for part, piece in self.pieces.items()}
        if not self.has_rows:
            parts = {part: value.reshape(1, 1, -1) for part, value in parts.items()}
        return frozen.Quantized(self.format, parts["data"], parts["scale"], parts.get("zero"))

    @property
    def has_rows(self) -> bool:
        """False if blocks cross rows, as those of nf4 may: then it is packed as a single row."""
        return self.pieces["data"].shape[0] == self.shape[0]

    def decode(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> torch.Tensor:
        """Its values, read now from the tensors of a folder."""
        return self.packed(tensors).dequantize(dtype).view(self.shape)


class PackedTensor(StoredTensor):
    """A packed matrix: read() decodes it, packed() returns its bytes as a weight of one expert."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        packed: Callable[[], frozen.Quantized],
    ) -> None:
        super().__init__(shape, dtype, lambda: packed().dequantize(dtype)[0])
        self.packed = packed


Config: TypeAlias = Mapping[str, Any]


class Kind(NamedTuple):
    """A quantization method of published folders.

    data, scale: what follows a layer's name in the names of these tensors; others: the same for the rest of them.
    check: raises CheckpointError for settings of quantization_config that are not computed.
    matrix: the matrix of a layer's name; raises CheckpointError for tensors that are missing or do not fit.
    """

    data: str
    scale: str
    others: tuple[str, ...]
    check: Callable[[str, Config], None]
    matrix: Callable[[Base, str], Matrix]

    def has(self, base: Base, stem: str) -> bool:
        """True if the layer of this name is packed."""
        return stem + self.data in base.tensors and stem + self.scale in base.tensors

    def is_packed(self, base: Base, stem: str) -> bool:
        """True for a layer in this format, complete or not."""
        tensor = base.tensors.get(stem + self.data)
        return tensor is not None and (self.has(base, stem) or tensor.dtype not in FLOATS)

    def is_beside(self, name: str) -> bool:
        """True for names of tensors that belong to packed data."""
        return name.endswith((self.scale, *self.others))


def kind_of(base: Base) -> Kind | None:
    """The kind that quantization_config names, None for others; CheckpointError for settings that are not computed."""
    config = base.config.get("quantization_config") or {}
    try:
        kind = KINDS.get(config.get("quant_method", ""))
        if kind is not None:
            kind.check(str(base.folder), config)
            for what in refusals(config["quant_method"], config):
                _refuse(base.folder, f"quantization_config with {what}")
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{base.folder}: quantization_config is damaged: {error}") from error
    return kind


def _read(stored: StoredTensor, piece: Piece) -> torch.Tensor:
    tensor = stored.read()
    if piece.turn is None:
        return tensor.reshape(piece.shape)
    turned = piece.turn(tensor.reshape(-1).view(torch.uint8).numpy())
    return torch.from_numpy(turned.reshape(-1).view(np.uint8)).view(piece.dtype).reshape(piece.shape)


def _stored(base: Base, name: str, dims: int = 2) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor."""
    if name not in base.tensors:
        raise CheckpointError(f"{base.folder} lacks {name}")
    tensor = base.tensors[name]
    if len(tensor.shape) != dims:
        raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {dims} dimensions")
    return tensor.shape, tensor.dtype


def _refuse(folder: object, what: str) -> None:
    raise CheckpointError(
        f"{folder}: {what}, which is not computed here: dequantise the model to bfloat16 first"
    )


def _expect(base: Base, name: str, expected: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Piece:
    """The piece that a tensor is as it lies; CheckpointError for other shapes and dtypes."""
    shape, dtype = _stored(base, name)
    if shape != expected or dtype not in dtypes:
        raise CheckpointError(
            f"{base.folder}: {name} is {dtype} {list(shape)}, expected {dtypes[0]} {list(expected)}"
        )
    return Piece(name, (shape[0], shape[1]), dtype)


def _groups(base: Base, name: str, columns: int, groups: int) -> None:
    if groups == 0 or columns % groups or columns // groups % 32:
        raise CheckpointError(
            f"{base.folder}: {name} has {groups} groups for {columns} columns: groups of a multiple of 32 are computed"
        )


def _fp8(base: Base, stem: str) -> Matrix:
    (rows, columns), dtype = _stored(base, f"{stem}.weight")
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scale = _expect(base, f"{stem}.weight_scale_inv", blocks, (torch.float32, torch.bfloat16))
    data = Piece(f"{stem}.weight", (rows, columns), dtype)
    return Matrix("fp8_block", (rows, columns), {"data": data, "scale": scale})


def _compressed(base: Base, stem: str) -> Matrix:
    (rows, words), dtype = _stored(base, f"{stem}.weight_packed")
    (_, groups), _ = _stored(base, f"{stem}.weight_scale")
    _groups(base, f"{stem}.weight_scale", 8 * words, groups)
    pieces = {
        "data": Piece(f"{stem}.weight_packed", (rows, words), dtype),
        "scale": _expect(base, f"{stem}.weight_scale", (rows, groups), FLOATS),
    }
    zero = f"{stem}.weight_zero_point"
    if zero in base.tensors:
        pieces["zero"] = _expect(base, zero, (-(-rows // 8), groups), (torch.int32,))
    return Matrix("int4", (rows, 8 * words), pieces)


def _gptq(base: Base, stem: str) -> Matrix:
    (words, rows), _ = _stored(base, f"{stem}.qweight")
    columns = 8 * words
    config = base.config["quantization_config"]
    is_first = _gptq_format(config) == "gptq"  # whose zero points have 1 subtracted
    matrix = _turned(base, stem, rows, columns, transposed, gptq_zeros(is_first))
    _, groups = matrix.pieces["scale"].shape
    name = f"{stem}.g_idx"
    if name in base.tensors:
        order = base.tensors[name].read()
        expected = torch.arange(columns, dtype=order.dtype) // (columns // groups)
        if not torch.equal(order, expected):
            _refuse(base.folder, f"GPTQ with act-order ({name} is not in the order of the columns)")
    elif config.get("desc_act"):
        _refuse(base.folder, "GPTQ with act-order (desc_act)")
    return matrix


def _awq(base: Base, stem: str) -> Matrix:
    (columns, words), _ = _stored(base, f"{stem}.qweight")
    return _turned(base, stem, 8 * words, columns, awq_words, awq_zeros)


def _turned(
    base: Base, stem: str, rows: int, columns: int, words: Callable[..., Any], zeros: Callable[..., Any]
) -> Matrix:
    """The matrix of a qweight: int4 once data, scale and zero are turned."""
    names = {part: stem + suffix for part, suffix in QWEIGHT.items()}
    (groups, _), of_scale = _stored(base, names["scale"])
    _groups(base, names["scale"], columns, groups)
    if rows % 8 or columns % 8:
        raise CheckpointError(
            f"{base.folder}: {names['data']} is of {rows} x {columns}, which are no whole words"
        )
    _expect(base, names["data"], base.tensors[names["data"]].shape, (torch.int32,))
    _expect(base, names["scale"], (groups, rows), (torch.float16, *FLOATS))
    _expect(base, names["zero"], (groups, rows // 8), (torch.int32,))
    shapes = {"data": (rows, columns // 8), "scale": (rows, groups), "zero": (rows // 8, groups)}
    dtypes = {"data": torch.int32, "scale": of_scale, "zero": torch.int32}
    turns = {"data": words, "scale": transposed, "zero": zeros}
    pieces = {
        part: Piece(
            name,
            shapes[part],
            dtypes[part],
            Turn(turns[part], base.tensors[name].shape, f"u{dtypes[part].itemsize}"),
        )
        for part, name in names.items()
    }
    return Matrix("int4", (rows, columns), pieces)


QWEIGHT = MappingProxyType({"data": ".qweight", "scale": ".scales", "zero": ".qzeros"})
NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"


def _nf4(base: Base, stem: str) -> Matrix:
    names = f"{stem}.weight", f"{stem}.weight.absmax"
    for name in (*names, stem + NF4_STATE):
        if name not in base.tensors:
            raise CheckpointError(f"{base.folder} lacks {name}")
    state = bytes(base.tensors[stem + NF4_STATE].read().tolist())
    try:
        values = json.loads(state)
        rows, columns = map(int, values["shape"])
        block = int(values.get("blocksize", 64))
        nested = float(values["nested_offset"]) if "nested_offset" in values else None
        of_nested = int(values.get("nested_blocksize", 256))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{base.folder}: {stem}{NF4_STATE} is no quant_state: {error}") from error
    data, scale = (base.tensors[name] for name in names)
    numel = rows * columns
    expected = (data, torch.uint8, numel // 2), (scale, torch.float32 if nested is None else torch.uint8, -1)
    for name, (tensor, dtype, size) in zip(names, expected, strict=True):
        size = -(-numel // block) if size < 0 else size
        if tensor.dtype != dtype or math.prod(tensor.shape) != size or numel % block:
            raise CheckpointError(
                f"{base.folder}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} [{size}] for "
                f"[{rows}, {columns}] in blocks of {block}"
            )
    turn = None if nested is None else _nested(base, stem, nested, of_nested, math.prod(scale.shape))
    of_row = (rows, columns // block) if columns % block == 0 else (1, numel // block)
    pieces = {
        "data": Piece(names[0], (rows, columns // 2) if of_row[0] == rows else (1, numel // 2), torch.uint8),
        "scale": Piece(names[1], of_row, torch.float32, turn),
    }
    return Matrix("nf4", (rows, columns), pieces)


def _nested(base: Base, stem: str, offset: float, block: int, num_scales: int) -> Turn:
    """Turns absmax in 8 bits into float32; what it needs is a hundredth of that, and read here."""
    absmax, code = f"{stem}.weight.nested_absmax", f"{stem}.weight.nested_quant_map"
    values = []
    for name, size in ((absmax, -(-num_scales // 256)), (code, 256)):
        shape, dtype = _stored(base, name, 1)
        if block != 256 or shape != (size,) or dtype != torch.float32:
            raise CheckpointError(
                f"{base.folder}: {name} is {dtype} {list(shape)} for blocks of {block}, expected float32 [{size}] for "
                "blocks of 256"
            )
        values.append(base.tensors[name].read())
    return Turn(nested_scales(values[0], values[1], offset), (num_scales,), "u1")


def _check_fp8(folder: str, config: Config) -> None:
    if list(config.get("weight_block_size") or ()) != [128, 128]:
        _refuse(folder, f"FP8 with weight_block_size {config.get('weight_block_size')} instead of [128, 128]")


def _check_compressed(folder: str, config: Config) -> None:
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


def _gptq_format(config: Config) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _check_gptq(folder: str, config: Config) -> None:
    if config.get("bits") != 4:
        _refuse(folder, f"GPTQ with {config.get('bits')} bits instead of 4")
    if _gptq_format(config) not in ("gptq", "gptq_v2"):
        _refuse(folder, f"GPTQ of checkpoint_format {_gptq_format(config)!r} instead of 'gptq' or 'gptq_v2'")
    if config.get("is_marlin_format"):
        _refuse(folder, "GPTQ of is_marlin_format")
    for name, changes in (config.get("dynamic") or {}).items():
        if not name.startswith("-") and (changes or {}).get("bits", 4) != 4:
            _refuse(folder, f"GPTQ with {changes['bits']} bits for {name!r}")


def _check_awq(folder: str, config: Config) -> None:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        _refuse(folder, f"AWQ with {bits} bits instead of 4")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        _refuse(folder, f"AWQ of version {version!r} instead of 'gemm'")


def _check_bitsandbytes(folder: str, config: Config) -> None:
    if not config.get("load_in_4bit", config.get("_load_in_4bit", True)):
        _refuse(folder, "bitsandbytes with 8 bits instead of 4")
    if config.get("bnb_4bit_quant_type", "nf4") != "nf4":
        _refuse(folder, f"bitsandbytes of type {config.get('bnb_4bit_quant_type')!r} instead of 'nf4'")
    if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        _refuse(folder, f"bitsandbytes with bnb_4bit_quant_storage {config['bnb_4bit_quant_storage']!r}")


KINDS = MappingProxyType(
    {
        "fp8": Kind(".weight", ".weight_scale_inv", (".input_scale",), _check_fp8, _fp8),
        "compressed-tensors": Kind(
            ".weight_packed",
            ".weight_scale",
            (".weight_shape", ".weight_zero_point", ".k_scale", ".v_scale", ".input_scale"),
            _check_compressed,
            _compressed,
        ),
        "gptq": Kind(".qweight", ".scales", (".qzeros", ".g_idx"), _check_gptq, _gptq),
        "awq": Kind(".qweight", ".scales", (".qzeros",), _check_awq, _awq),
        "bitsandbytes": Kind(
            ".weight",
            ".weight.absmax",
            (NF4_STATE, ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
            _check_bitsandbytes,
            _nf4,
        ),
    }
)
