"""Read FP8 with a scale for each block (DeepSeek-V3), MXFP8, and the FP8 and FP4 of DeepSeek-V4.

    weight float8_e4m3fn [rows, columns]      weight_scale_inv, for blocks of 128 x 128 or what the settings say
    weight int8 [rows, columns / 2]           two FP4 values a byte, and a scale for each 32 columns

Scales are floats or exponents of 2 in a byte. Blocks of 128 x 128 and both Microscaling formats (MXFP4, MXFP8: an
exponent for each 32 columns) have operators; other blocks are decoded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    Config,
    Decoded,
    Kind,
    Matrix,
    Piece,
    Turn,
    e8m0,
    fp4,
    refuse,
    scaled,
    stored,
    tensor_of,
    unlike,
)
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

FP8_BLOCK = 128  # rows and columns of the only block that the operators have
MX_BLOCK = 32  # columns of an exponent in OCP's Microscaling formats
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # dtypes of exponents
_SCALES = (torch.float32, torch.bfloat16, *EXPONENTS)


class Fp8(Kind):
    scale = ".weight_scale_inv"
    others = (".input_scale", ".activation_scale")
    known = """
        weight_block_size fmt scale_fmt activation_scheme modules_to_not_convert modules_to_convert ignored_layers
        dequantize expert_dtype
    """

    def check(self, folder: str, config: Config) -> None:
        block = config.get("weight_block_size")
        if block is not None and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            refuse(folder, f"FP8 with weight_block_size {block}")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix | Decoded:
        name, scale_name = f"{stem}.weight", stem + self.scale
        (rows, columns), dtype = stored(base, name)
        scale = tensor_of(base, scale_name)
        if dtype in (torch.int8, torch.uint8):  # two numbers of FP4 in each byte
            columns *= 2
            if scale.shape != (rows, columns // MX_BLOCK) or columns % MX_BLOCK or scale.dtype not in _SCALES:
                raise unlike(base, scale_name, f"[{rows}, {columns // MX_BLOCK}] for FP4 [{rows}, {columns}]")
            if scale.dtype not in EXPONENTS:
                return Decoded(
                    "fp4",
                    (rows, columns),
                    (name, scale_name),
                    lambda data, scale: scaled(fp4(data), e8m0(scale), 1, MX_BLOCK),
                )
            pieces = {
                "data": Piece(name, (rows, columns // 2), torch.uint8),
                "scale": Piece(scale_name, (rows, columns // MX_BLOCK), torch.uint8),
            }
            return Matrix("mxfp4", (rows, columns), pieces)
        if dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{base.folder}: {name} is {dtype}, expected torch.float8_e4m3fn or FP4 in int8"
            )
        # FP8, with an exponent for each 32 columns, or blocks
        block = _block(base, scale_name, (rows, columns))
        if is_mxfp8(scale, rows, columns):
            return mxfp8(name, scale_name, rows, columns)
        if block != (FP8_BLOCK, FP8_BLOCK):  # no operator has others
            return Decoded("fp8", (rows, columns), (name, scale_name), fp8_values(*block))
        # the operator takes float32 and bfloat16: exponents are converted while they are read
        grid = (scale.shape[0], scale.shape[1])
        of_scale = Piece(scale_name, grid, scale.dtype)
        if scale.dtype in EXPONENTS:
            turn = Turn(lambda exponents: e8m0(torch.from_numpy(exponents)).numpy(), scale.shape, "u1")
            of_scale = Piece(scale_name, grid, torch.float32, turn)
        pieces = {"data": Piece(name, (rows, columns), dtype), "scale": of_scale}
        return Matrix("fp8_block", (rows, columns), pieces)


class DeepseekV4(Fp8):
    """FP8 whose scales have another name; its experts are FP4."""

    scale = ".scale"


def _block(base: ModelFolder, name: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Find (rows, columns) of the block that an entry of a matrix's scale is for, by the shape of the scale."""
    scale = base.tensors[name]
    said = tuple(base.quantization.get("weight_block_size") or ())
    # What the settings say, or the usual block, rows, the whole matrix
    known = [said] if said else [(FP8_BLOCK, FP8_BLOCK), (1, shape[1]), shape]
    known += [(1, MX_BLOCK)] if scale.dtype in EXPONENTS else []
    for block in known:
        if len(block) == 2 and scale.shape == tuple(-(-n // m) for n, m in zip(shape, block, strict=True)):
            break
    else:  # one scale for the matrix
        block = shape
        if scale.shape not in ((), (1,)):
            blocks = [-(-n // m) for n, m in zip(shape, said or (FP8_BLOCK, FP8_BLOCK), strict=True)]
            raise unlike(base, name, f"{blocks} for {list(shape)}")
    if scale.dtype not in _SCALES:
        raise unlike(base, name, f"one of {', '.join(map(str, _SCALES))}")
    return block[0], block[1]


def fp8_values(rows: int, columns: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function that decodes a matrix with a scale for each block of rows x columns."""

    def values(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        grid = (-(-data.shape[0] // rows), -(-data.shape[1] // columns))
        return scaled(data.float(), e8m0(scale).reshape(grid), rows, columns)

    return values


def is_mxfp8(scale: StoredTensor, rows: int, columns: int) -> bool:
    """True if a scale has an exponent for each 32 columns of a matrix [rows, columns]."""
    return scale.dtype in EXPONENTS and columns % MX_BLOCK == 0 and scale.shape == (rows, columns // MX_BLOCK)


def mxfp8(name: str, scale_name: str, rows: int, columns: int) -> Matrix:
    """Describe the matrix of MXFP8; name and scale_name: the tensors of its E4M3 numbers and of its exponents."""
    pieces = {
        "data": Piece(name, (rows, columns), torch.float8_e4m3fn),
        "scale": Piece(scale_name, (rows, columns // MX_BLOCK), torch.uint8),
    }
    return Matrix("mxfp8", (rows, columns), pieces)
