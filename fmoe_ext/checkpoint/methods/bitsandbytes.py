"""Read bitsandbytes' NF4, also with nested scales.

Tensors of a layer:
    weight             uint8 [n, 1]: two values a byte. The matrix is flat: blocks may cross the ends of rows
    weight.absmax      a scale for each block; nested: 8 bits, by a table and a scale for each 256 of them
    weight.quant_state.bitsandbytes__nf4      JSON in a tensor of bytes: shape, size of blocks
"""

import json
import math

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import Config, Kind, Matrix, Piece, Turn, refuse, stored, tensor_of
from fmoe_ext.checkpoint.model_folder import ModelFolder

_STATE = ".weight.quant_state.bitsandbytes__nf4"


class Bitsandbytes(Kind):
    scale = ".weight.absmax"
    others = (_STATE, ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map")
    known = """
        load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage
        bnb_4bit_compute_dtype bnb_4bit_use_double_quant llm_int8_threshold llm_int8_skip_modules
        llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight
    """

    def check(self, folder: str, config: Config) -> None:
        if not config.get("load_in_4bit", config.get("_load_in_4bit", True)):
            refuse(folder, "bitsandbytes with 8 bits instead of 4")
        if config.get("bnb_4bit_quant_type", "nf4") != "nf4":
            refuse(folder, f"bitsandbytes of type {config.get('bnb_4bit_quant_type')!r} instead of 'nf4'")
        if config.get("bnb_4bit_quant_storage", "uint8") != "uint8":
            refuse(folder, f"bitsandbytes with bnb_4bit_quant_storage {config['bnb_4bit_quant_storage']!r}")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix:
        # quant_state says shape and blocks
        names = f"{stem}.weight", f"{stem}.weight.absmax"
        data, scale, state = (tensor_of(base, name) for name in (*names, stem + _STATE))
        try:
            values = json.loads(bytes(state.read().tolist()))
            rows, columns = map(int, values["shape"])
            block = int(values.get("blocksize", 64))
            nested = float(values["nested_offset"]) if "nested_offset" in values else None
            of_nested = int(values.get("nested_blocksize", 256))
            if block < 1:
                raise ValueError(f"blocksize is {block}")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{base.folder}: {stem}{_STATE} is no quant_state: {error}") from error
        # Whole blocks, and as many bytes and scales as they need
        numel = rows * columns
        of_scale = torch.float32 if nested is None else torch.uint8
        for name, tensor, dtype, size in (
            (names[0], data, torch.uint8, numel // 2),
            (names[1], scale, of_scale, -(-numel // block)),
        ):
            if tensor.dtype != dtype or math.prod(tensor.shape) != size or numel % block:
                raise CheckpointError(
                    f"{base.folder}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} [{size}] for "
                    f"[{rows}, {columns}] in blocks of {block}"
                )
        # if blocks cross the ends of rows, the matrix is one row of blocks
        by_row = columns % block == 0
        turn = None if nested is None else _nested(base, stem, nested, of_nested, math.prod(scale.shape))
        pieces = {
            "data": Piece(names[0], (rows, columns // 2) if by_row else (1, numel // 2), torch.uint8),
            "scale": Piece(
                names[1], (rows, columns // block) if by_row else (1, numel // block), torch.float32, turn
            ),
        }
        return Matrix("nf4", (rows, columns), pieces)


def _nested(base: ModelFolder, stem: str, offset: float, block: int, num_scales: int) -> Turn:
    """Make the Turn of nested scales, uint8 [n] -> float32; the table and scales that it needs are small: read now."""
    absmax, code = f"{stem}.weight.nested_absmax", f"{stem}.weight.nested_quant_map"
    # 256 values of the table, and a scale for each 256 scales
    values = []
    for name, size in ((absmax, -(-num_scales // 256)), (code, 256)):
        shape, dtype = stored(base, name, 1)
        if block != 256 or shape != (size,) or dtype != torch.float32:
            raise CheckpointError(
                f"{base.folder}: {name} is {dtype} {list(shape)} for blocks of {block}, expected float32 [{size}] for "
                "blocks of 256"
            )
        values.append(base.tensors[name].read())
    return Turn(
        lambda scales: frozen.nf4_scales(torch.from_numpy(scales), values[0], values[1], offset).numpy(),
        (num_scales,),
        "u1",
    )
