"""Packed matrices as published files name and lay them out, and what every quantization method has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Turn:
    """Turns the bytes of a tensor by a function of the array. shape, dtype: of it in the file, as NumPy has them."""

    function: Callable[[Array], Array]
    shape: tuple[int, ...]
    dtype: str

    def __call__(self, data: Array) -> Array:
        """The turned array of the bytes of a file, uint8 [n]."""
        return self.function(data.view(self.dtype).reshape(self.shape))


def transposed(values: Array) -> Array:
    """[n, m] -> [m, n]."""
    return np.ascontiguousarray(values.T)


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
        return self.quantized(
            {part: read_piece(tensors[piece.name].read(), piece) for part, piece in self.pieces.items()}
        )

    def quantized(self, parts: Mapping[str, torch.Tensor]) -> frozen.Quantized:
        """The weight of one expert that its pieces make."""
        one = {
            part: value[None] if self.has_rows else value.reshape(1, 1, -1) for part, value in parts.items()
        }
        data = frozen.FORMATS[self.format].of_bytes(one["data"].view(torch.uint8))
        return frozen.Quantized(self.format, data, one["scale"], one.get("zero"))

    @property
    def has_rows(self) -> bool:
        """False if blocks cross rows, as those of nf4 may: then it is packed as a single row."""
        return self.pieces["data"].shape[0] == self.shape[0]

    @property
    def zeros_share_words(self) -> bool:
        """True if a word has the zero points of several rows."""
        return "zero" in self.pieces and self.pieces["zero"].shape[0] < self.shape[0]

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

    data: what may follow a layer's name in the name of its packed data. scale: the same of its scales; others: of the
    rest of its tensors.
    known: keys of quantization_config that are read or change no weight, separated by spaces; any other is refused.
    check: raises CheckpointError for settings of quantization_config that are not computed.
    matrix: the matrix of a layer's name, as an operator takes it or decoded; raises CheckpointError for tensors that
    are missing or do not fit, and for layouts that are not read.
    refusals: key and value of settings below those of the config itself that are not computed.
    """

    data: tuple[str, ...]
    scale: str
    others: tuple[str, ...]
    known: str
    check: Callable[[str, Config], None]
    matrix: Callable[[ModelFolder, str], Any]
    refusals: Callable[[Config], Iterator[str]] = lambda config: iter(())

    def has(self, base: ModelFolder, stem: str) -> bool:
        """True if the layer of this name is packed."""
        return stem + self.scale in base.tensors and any(stem + data in base.tensors for data in self.data)

    def is_packed(self, base: ModelFolder, stem: str) -> bool:
        """True for a layer in this format, complete or not."""
        found = [base.tensors[stem + data] for data in self.data if stem + data in base.tensors]
        return bool(found) and (self.has(base, stem) or found[0].dtype not in FLOATS)

    def stem_of(self, name: str) -> str | None:
        """The name of a layer whose packed data a tensor would be; None for other names."""
        return next((name.removesuffix(data) for data in self.data if name.endswith(data)), None)

    def plain_name(self, name: str) -> str:
        """The name that packed data has in a plain model."""
        stem = self.stem_of(name)
        return name if stem is None else f"{stem}.weight"

    def is_beside(self, name: str) -> bool:
        """True for names of tensors that belong to packed data."""
        return name.endswith((self.scale, *self.others))


def _factors(whole: Array, rows: int, place: int) -> Array:
    """The factors [rows, 2] of all rows, of the one number of a matrix; place: of it beside a 1."""
    factors = np.ones((rows, 2), np.float32)
    factors[:, place] = whole.reshape(())
    return factors


NVFP4_BLOCK = 16


def nvfp4(
    base: ModelFolder, names: tuple[str, str, str], shape: tuple[int, int], is_divisor: bool
) -> Matrix | None:
    """The matrix of codes, scales and the number of the whole matrix; None for rows that no operator takes.

    is_divisor: scales are divided by that number, not multiplied.
    """
    rows, columns = shape
    if columns % (2 * NVFP4_BLOCK):
        return None
    data, scale, whole = names
    turn = Turn(lambda number: _factors(number, rows, int(is_divisor)), base.tensors[whole].shape, "f4")
    pieces = {
        "data": Piece(data, (rows, columns // 2), torch.uint8),
        "scale": Piece(scale, (rows, columns // NVFP4_BLOCK), torch.float8_e4m3fn),
        "zero": Piece(whole, (rows, 2), torch.float32, turn),
    }
    return Matrix("nvfp4", shape, pieces)


def read_piece(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece that a tensor of a file becomes."""
    if piece.turn is None:
        return tensor.reshape(piece.shape)
    turned = piece.turn(tensor.reshape(-1).view(torch.uint8).numpy())
    return torch.from_numpy(turned.reshape(-1).view(np.uint8)).view(piece.dtype).reshape(piece.shape)


def tensor_of(base: ModelFolder, name: str) -> StoredTensor:
    """The tensor of a name; CheckpointError if it is missing."""
    if name not in base.tensors:
        raise CheckpointError(f"{base.folder} lacks {name}")
    return base.tensors[name]


def stored(base: ModelFolder, name: str, dims: int = 2) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor."""
    tensor = tensor_of(base, name)
    if len(tensor.shape) != dims:
        raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {dims} dimensions")
    return tensor.shape, tensor.dtype


def refuse(folder: object, what: str) -> None:
    """CheckpointError: what is not computed."""
    raise CheckpointError(
        f"{folder}: {what}, which is not computed here: dequantise the model to bfloat16 first"
    )


def expect(base: ModelFolder, name: str, expected: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Piece:
    """The piece that a tensor is as it lies; CheckpointError for other shapes and dtypes."""
    shape, dtype = stored(base, name)
    if shape != expected or dtype not in dtypes:
        raise CheckpointError(
            f"{base.folder}: {name} is {dtype} {list(shape)}, expected {dtypes[0]} {list(expected)}"
        )
    return Piece(name, (shape[0], shape[1]), dtype)


def check_groups(base: ModelFolder, name: str, columns: int, groups: int) -> None:
    """CheckpointError unless the columns are whole groups of a multiple of 32."""
    if groups == 0 or columns % groups or columns // groups % 32:
        raise CheckpointError(
            f"{base.folder}: {name} has {groups} groups for {columns} columns: groups of a multiple of 32 are computed"
        )


USUAL = MappingProxyType({"fmt": ("e4m3", "float8_e4m3fn"), "pack_dtype": ("int32",), "type": ("int",)})


def is_usual(key: str, value: Any) -> bool:
    """True for a value that says "as usual", of a key that is refused with any other."""
    if key == "sparsity_config" and isinstance(value, Mapping) and value:
        return value.get("format") == "dense"
    return value in (None, False, "", [], {}) or value in USUAL.get(key, ())
