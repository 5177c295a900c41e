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
from fmoe_ext.checkpoint.model_folder import FLOATS, Base
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
    known: keys of quantization_config that are read or change no weight, separated by spaces; any other is refused.
    check: raises CheckpointError for settings of quantization_config that are not computed.
    matrix: the matrix of a layer's name; raises CheckpointError for tensors that are missing or do not fit.
    refusals: key and value of settings below those of the config itself that are not computed.
    """

    data: str
    scale: str
    others: tuple[str, ...]
    known: str
    check: Callable[[str, Config], None]
    matrix: Callable[[Base, str], Matrix]
    refusals: Callable[[Config], Iterator[str]] = lambda config: iter(())

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


def _read(stored: StoredTensor, piece: Piece) -> torch.Tensor:
    tensor = stored.read()
    if piece.turn is None:
        return tensor.reshape(piece.shape)
    turned = piece.turn(tensor.reshape(-1).view(torch.uint8).numpy())
    return torch.from_numpy(turned.reshape(-1).view(np.uint8)).view(piece.dtype).reshape(piece.shape)


def stored(base: Base, name: str, dims: int = 2) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor."""
    if name not in base.tensors:
        raise CheckpointError(f"{base.folder} lacks {name}")
    tensor = base.tensors[name]
    if len(tensor.shape) != dims:
        raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {dims} dimensions")
    return tensor.shape, tensor.dtype


def refuse(folder: object, what: str) -> None:
    """CheckpointError: what is not computed."""
    raise CheckpointError(
        f"{folder}: {what}, which is not computed here: dequantise the model to bfloat16 first"
    )


def expect(base: Base, name: str, expected: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Piece:
    """The piece that a tensor is as it lies; CheckpointError for other shapes and dtypes."""
    shape, dtype = stored(base, name)
    if shape != expected or dtype not in dtypes:
        raise CheckpointError(
            f"{base.folder}: {name} is {dtype} {list(shape)}, expected {dtypes[0]} {list(expected)}"
        )
    return Piece(name, (shape[0], shape[1]), dtype)


def check_groups(base: Base, name: str, columns: int, groups: int) -> None:
    """CheckpointError unless the columns are whole groups of a multiple of 32."""
    if groups == 0 or columns % groups or columns // groups % 32:
        raise CheckpointError(
            f"{base.folder}: {name} has {groups} groups for {columns} columns: groups of a multiple of 32 are computed"
        )


USUAL = MappingProxyType({"fmt": ("e4m3", "float8_e4m3fn"), "pack_dtype": ("int32",), "type": ("int",)})


def is_usual(key: str, value: Any) -> bool:
    """True for a value that says "as usual", of a key that is refused with any other."""
    if key == "sparsity_config" and isinstance(value, Mapping):
        return value.get("format") == "dense"
    return value in (None, False, "", [], {}) or value in USUAL.get(key, ())
