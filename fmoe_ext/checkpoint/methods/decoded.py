"""Matrices in layouts that no operator decodes: they are decoded when they are read, in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fmoe_ext.checkpoint.methods.base import Matrix, read_piece
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.frozen.formats.base import nibbles
from fmoe_ext.frozen.formats.mxfp4 import e2m1


@dataclass(frozen=True)
class Decoded:
    """A matrix [rows, columns] that is decoded when it is read.

    format: as the library calls it that writes it. names: its tensors in the files. values: makes float32
    [rows, columns] of these tensors.
    """

    format: str
    shape: tuple[int, int]
    names: tuple[str, ...]
    values: Callable[..., torch.Tensor]

    def decode(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> torch.Tensor:
        """Its values, read now from the tensors of a folder."""
        return self.values(*(tensors[name].read() for name in self.names)).to(dtype)


def decoded(matrix: Matrix | Decoded) -> Decoded:
    """The same matrix, decoded when it is read."""
    if isinstance(matrix, Decoded):
        return matrix
    names = tuple(dict.fromkeys(piece.name for piece in matrix.pieces.values()))

    def values(*tensors: torch.Tensor) -> torch.Tensor:
        by_name = dict(zip(names, tensors, strict=True))
        parts = {part: read_piece(by_name[piece.name], piece) for part, piece in matrix.pieces.items()}
        return matrix.quantized(parts).dequantize(torch.float32).view(matrix.shape)

    return Decoded(matrix.format, matrix.shape, names, values)


def plain(base: ModelFolder, name: str) -> Decoded:
    """A matrix in a floating dtype beside decoded ones."""
    rows, columns = base.tensors[name].shape
    return Decoded("plain", (rows, columns), (name,), lambda tensor: tensor.float())


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Exponents in uint8, as OCP's Microscaling has them, or scales in any floating dtype -> float32."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        exponent = scale.view(torch.uint8).int()
        # The bits of 2^(e - 127); 2^-127 is subnormal, and 255 is NaN.
        bits = torch.where(exponent == 0, 0x400000, exponent << 23)
        return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)
    return scale.float()


def fp4(data: torch.Tensor) -> torch.Tensor:
    """Two values of E2M1 in each byte [*, n], the first in the low bits -> float32 [*, 2n]."""
    return e2m1(data.device)[nibbles(data.view(torch.uint8)).int()]


def scaled(values: torch.Tensor, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Blocks of rows x columns of a matrix, each times its entry of scale [row blocks, column blocks]."""
    out, width = values.shape
    of_row = torch.arange(out, device=scale.device) // rows
    of_column = torch.arange(width, device=scale.device) // columns
    return values * scale[of_row][:, of_column]


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [n, words], a stream of integers of some bits in each row, the lowest first -> int32 [n, count]."""
    data: np.ndarray[Any, Any] = words.contiguous().view(torch.uint8).numpy()
    if bits == 8:
        return torch.from_numpy(data)[:, :count].int()
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy(stream.reshape(len(data), count, bits) @ weights).int()
