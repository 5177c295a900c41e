"""Describe packed matrices as published files have them: the base of the quantization methods in this folder.

A linear layer [rows, columns] of a packed folder is several tensors: its numbers in 4 or 8 bits, a scale for each
channel, group or block of them, perhaps zero points, or one number for the whole matrix:

    model.layers.0.mlp.experts.3.up_proj.weight_packed  uint8 [rows, columns / 2]
    model.layers.0.mlp.experts.3.up_proj.weight_scale   uint8 [rows, columns / 32]

A method (Kind) knows these names, and describes the matrix as one of two things:

    Matrix     a layout that an operator computes with, as it lies or after its bytes are rearranged (Piece.turn)
    Decoded    any other layout: float32, computed when the matrix is read

Both name their tensors and say how the bytes become values, so that streaming can read byte ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.frozen.formats.base import nibbles
from fmoe_ext.frozen.formats.microscaling import e2m1

Array: TypeAlias = np.ndarray[Any, Any]
Config: TypeAlias = Mapping[str, Any]  # quantization_config
NVFP4_BLOCK = 16
# {key that is refused with other values: values that say "as usual"}
USUAL = MappingProxyType({"fmt": ("e4m3", "float8_e4m3fn"), "pack_dtype": ("int32",), "type": ("int",)})


@dataclass(frozen=True)
class Turn:
    """Makes a piece from the bytes of a tensor, uint8 [n], by a function of the array that they are in the file."""

    function: Callable[[Array], Array]
    shape: tuple[int, ...]  # in the file
    dtype: str  # in the file, as NumPy calls it

    def __call__(self, data: Array) -> Array:
        return self.function(data.view(self.dtype).reshape(self.shape))


def transposed(values: Array) -> Array:
    """Transpose [n, m] to [m, n], in memory of its own."""
    return np.ascontiguousarray(values.T)


class Piece(NamedTuple):
    """One tensor (data, scale or zero) of a packed matrix, as frozen.Quantized takes it."""

    name: str  # in the files
    shape: tuple[int, int]
    dtype: torch.dtype
    turn: Turn | None = None  # makes it from the tensor in the file; None if it is the same

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the piece from the tensor in the file."""
        if self.turn is None:
            return tensor.reshape(self.shape)
        # as bytes, because NumPy lacks bfloat16 and FP8
        turned = self.turn(tensor.reshape(-1).view(torch.uint8).numpy())
        return torch.from_numpy(turned.reshape(-1).view(np.uint8)).view(self.dtype).reshape(self.shape)


class Matrix(NamedTuple):
    """A packed matrix [rows, columns] in a layout that an operator takes."""

    format: str  # a name in frozen.FORMATS
    shape: tuple[int, int]
    pieces: dict[str, Piece]  # data, scale, and zero where there are zero points

    @property
    def has_rows(self) -> bool:
        """False if blocks cross the ends of rows, as nf4's may: then the matrix is packed as a single row."""
        return self.pieces["data"].shape[0] == self.shape[0]

    @property
    def zeros_share_words(self) -> bool:
        """True if a 32-bit word holds the zero points of several rows."""
        return "zero" in self.pieces and self.pieces["zero"].shape[0] < self.shape[0]

    def packed(self, tensors: Mapping[str, StoredTensor]) -> frozen.Quantized:
        """Read its bytes from the tensors of a folder, as a weight of one expert."""
        return self._quantized({piece.name: tensors[piece.name].read() for piece in self.pieces.values()})

    def decode(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> torch.Tensor:
        """Read its values from the tensors of a folder."""
        return self.packed(tensors).dequantize(dtype).view(self.shape)

    def decoded(self) -> Decoded:
        """Return the same matrix, decoded when it is read."""
        names = tuple(dict.fromkeys(piece.name for piece in self.pieces.values()))

        def values(*tensors: torch.Tensor) -> torch.Tensor:
            packed = self._quantized(dict(zip(names, tensors, strict=True)))
            return packed.dequantize(torch.float32).view(self.shape)

        return Decoded(self.format, self.shape, names, values)

    def _quantized(self, tensors: Mapping[str, torch.Tensor]) -> frozen.Quantized:
        # {data, scale, zero: [1, rows, *], or [1, 1, *] if blocks cross rows}
        one = {}
        for part, piece in self.pieces.items():
            value = piece.of(tensors[piece.name])
            one[part] = value[None] if self.has_rows else value.reshape(1, 1, -1)
        data = frozen.FORMATS[self.format].of_bytes(one["data"].view(torch.uint8))
        return frozen.Quantized(self.format, data, one["scale"], one.get("zero"))


@dataclass(frozen=True)
class Decoded:
    """A matrix [rows, columns] in a layout that no operator takes, decoded when it is read."""

    format: str  # as the library calls it that writes it
    shape: tuple[int, int]
    names: tuple[str, ...]  # its tensors in the files
    values: Callable[..., torch.Tensor]  # these tensors -> float32 [rows, columns]

    def decode(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> torch.Tensor:
        """Read its values from the tensors of a folder."""
        return self.values(*(tensors[name].read() for name in self.names)).to(dtype)

    def decoded(self) -> Decoded:
        return self


class PackedTensor(StoredTensor):
    """A packed matrix: read() decodes it, packed() returns its bytes as a weight of one expert."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, packed: Callable[[], frozen.Quantized]
    ) -> None:
        super().__init__(shape, dtype, lambda: packed().dequantize(dtype)[0])
        self.packed = packed


class Kind:
    """A quantization method of published folders: names of its tensors, its settings, and the matrix of a layer.

    A tensor's name is the layer's name (`stem`) and an ending:
    """

    data: tuple[str, ...] = (".weight",)  # endings of packed data
    scale = ""  # ending of scales
    others: tuple[str, ...] = ()  # endings of the other tensors of a layer
    known = ""  # keys of quantization_config that are read or change no weight; any other is refused

    def check(self, folder: str, config: Config) -> None:
        """Raise CheckpointError for settings of quantization_config that are not computed here."""
        raise NotImplementedError

    def matrix(self, base: ModelFolder, stem: str) -> Matrix | Decoded:
        """Describe a layer's matrix; CheckpointError for tensors that are missing or do not fit, or another layout."""
        raise NotImplementedError

    def has(self, base: ModelFolder, stem: str) -> bool:
        """True if the layer of this name is packed."""
        return stem + self.scale in base.tensors and any(stem + data in base.tensors for data in self.data)

    def is_packed(self, base: ModelFolder, stem: str) -> bool:
        """True for a layer in this format, complete or not."""
        found = [base.tensors[stem + data] for data in self.data if stem + data in base.tensors]
        # a layer without scales is incomplete if its numbers are no floats: matrix() then names what is missing
        return bool(found) and (self.has(base, stem) or found[0].dtype not in FLOATS)

    def stem_of(self, name: str) -> str | None:
        """Return the name of the layer whose packed data a tensor would be; None for other names."""
        return next((name.removesuffix(data) for data in self.data if name.endswith(data)), None)

    def plain_name(self, name: str) -> str:
        """Return the name that packed data has in a plain model."""
        stem = self.stem_of(name)
        return name if stem is None else f"{stem}.weight"

    def is_beside(self, name: str) -> bool:
        """True for names of tensors that belong to packed data."""
        return name.endswith((self.scale, *self.others))


def nvfp4(
    base: ModelFolder, names: tuple[str, str, str], shape: tuple[int, int], is_divisor: bool
) -> Matrix | None:
    """Describe NVFP4's matrix from codes, scales and one number for all; None for rows that no operator takes.

    is_divisor: the values are scales divided by that number, not multiplied.
    """
    rows, columns = shape
    # the operators need whole blocks of 32 columns
    if columns % (2 * NVFP4_BLOCK):
        return None
    data, scale, whole = names

    # the operator takes [factor, divisor] for each row, of which one is 1
    def factors(number: Array) -> Array:
        found = np.ones((rows, 2), np.float32)
        found[:, int(is_divisor)] = number.reshape(())
        return found

    pieces = {
        "data": Piece(data, (rows, columns // 2), torch.uint8),
        "scale": Piece(scale, (rows, columns // NVFP4_BLOCK), torch.float8_e4m3fn),
        "zero": Piece(whole, (rows, 2), torch.float32, Turn(factors, base.tensors[whole].shape, "f4")),
    }
    return Matrix("nvfp4", shape, pieces)


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales to float32, from any floating dtype or from exponents in uint8 (OCP's Microscaling)."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = scale.view(torch.uint8).int()
        # the bits of 2^(e - 127); 2^-127 is subnormal, and 255 is NaN
        bits = torch.where(exponent == 0, 0x400000, exponent << 23)
        return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)
    return scale.float()


def fp4(data: torch.Tensor) -> torch.Tensor:
    """Decode two values of E2M1 in each byte [*, n], the first in the low bits -> float32 [*, 2n]."""
    return e2m1(data.device)[nibbles(data.view(torch.uint8)).int()]


def scaled(values: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply each block of rows x columns of a matrix by its entry of scale [row blocks, column blocks]."""
    out, width = values.shape
    # the block of each row and column; last blocks may be smaller
    of_row = torch.arange(out, device=scale.device) // rows
    of_column = torch.arange(width, device=scale.device) // columns
    return values * scale[of_row][:, of_column]


def tensor_of(base: ModelFolder, name: str) -> StoredTensor:
    """Return the tensor of a name; CheckpointError if it is missing or empty: sizes of blocks divide by its sizes."""
    if name not in base.tensors:
        raise CheckpointError(f"{base.folder} lacks {name}")
    if 0 in base.tensors[name].shape:
        raise CheckpointError(f"{base.folder}: {name} is {list(base.tensors[name].shape)}, which is empty")
    return base.tensors[name]


def stored(base: ModelFolder, name: str, dims: int = 2) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor; CheckpointError for another number of dimensions."""
    tensor = tensor_of(base, name)
    if len(tensor.shape) != dims:
        raise CheckpointError(f"{base.folder}: {name} is {list(tensor.shape)}, expected {dims} dimensions")
    return tensor.shape, tensor.dtype


def refuse(folder: object, what: str) -> None:
    """Raise CheckpointError for what is not computed."""
    raise CheckpointError(
        f"{folder}: {what}, which is not computed here: dequantise the model to bfloat16 first"
    )


def unlike(base: ModelFolder, name: str, expected: str) -> CheckpointError:
    """Make the error for a tensor that is missing, or has another dtype or shape than expected."""
    found = base.tensors.get(name)
    is_so = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
    return CheckpointError(f"{base.folder}: {name} is {is_so}, expected {expected}")


def is_usual(key: str, value: Any) -> bool:
    """True for a value that says "as usual", of a key that is refused with any other."""
    if key == "sparsity_config" and isinstance(value, Mapping) and value:
        return value.get("format") == "dense"
    return value in (None, False, "", [], {}) or value in USUAL.get(key, ())
