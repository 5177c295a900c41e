"""FP8 with a scale for each block of 128 x 128, as DeepSeek-V3 has it."""

import torch

from fmoe_ext.checkpoint.methods.base import Config, Kind, Matrix, Piece, expect, refuse, stored
from fmoe_ext.checkpoint.model_folder import Base

KNOWN = """
    weight_block_size fmt scale_fmt activation_scheme modules_to_not_convert modules_to_convert ignored_layers
    dequantize
"""
FP8_BLOCK = 128


def check(folder: str, config: Config) -> None:
    if list(config.get("weight_block_size") or ()) != [128, 128]:
        refuse(folder, f"FP8 with weight_block_size {config.get('weight_block_size')} instead of [128, 128]")


def matrix(base: Base, stem: str) -> Matrix:
    (rows, columns), dtype = stored(base, f"{stem}.weight")
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scale = expect(base, f"{stem}.weight_scale_inv", blocks, (torch.float32, torch.bfloat16))
    data = Piece(f"{stem}.weight", (rows, columns), dtype)
    return Matrix("fp8_block", (rows, columns), {"data": data, "scale": scale})


FP8 = Kind(".weight", ".weight_scale_inv", (".input_scale",), KNOWN, check, matrix)
