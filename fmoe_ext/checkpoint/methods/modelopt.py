"""Read NVIDIA's Model Optimizer: NVFP4, FP8 and MXFP8; each layer's tensors say which it is.

Tensors of a layer:
    weight uint8                       NVFP4: weight_scale for each 16 columns, weight_scale_2 for the matrix
    weight float8_e4m3fn               FP8: weight_scale for the matrix, for rows, or for blocks
                                       MXFP8: weight_scale uint8, an exponent for each 32 columns
"""

from __future__ import annotations

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    NVFP4_BLOCK,
    Config,
    Decoded,
    Kind,
    Matrix,
    fp4,
    nvfp4,
    refuse,
    scaled,
    stored,
    tensor_of,
)
from fmoe_ext.checkpoint.methods.fp8 import EXPONENTS, FP8_BLOCK, fp8_values, is_mxfp8, mxfp8
from fmoe_ext.checkpoint.model_folder import ModelFolder

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


class Modelopt(Kind):
    scale = ".weight_scale"
    others = (".weight_scale_2", ".input_scale", ".k_scale", ".v_scale", ".pre_quant_scale")
    known = """
        config_groups ignore exclude_modules quant_algo kv_cache_scheme kv_cache_quant_algo producer group_size
        quantized_layers
    """

    def check(self, folder: str, config: Config) -> None:
        found = {config.get("quant_algo")}
        if found == {"MIXED_PRECISION"}:
            layers = config.get("quantized_layers") or {}
            found = {(layer or {}).get("quant_algo") for layer in layers.values()}
        for name in sorted(map(str, found - {None})):
            if name not in _ALGORITHMS:
                refuse(folder, f"modelopt with quant_algo {name!r}")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix | Decoded:
        # AWQ-like: inputs would have to be multiplied, too
        if f"{stem}.pre_quant_scale" in base.tensors:
            refuse(base.folder, f"{stem}.pre_quant_scale, which scales inputs")
        name, scale, whole = (f"{stem}.weight{part}" for part in ("", "_scale", "_scale_2"))
        (rows, width), dtype = stored(base, name)
        found = tensor_of(base, scale)
        if dtype == torch.uint8:
            return _nvfp4(base, (name, scale, whole), rows, 2 * width)
        if dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{base.folder}: {name} is {dtype}, expected torch.float8_e4m3fn or NVFP4 in uint8"
            )
        if is_mxfp8(found, rows, width):
            return mxfp8(name, scale, rows, width)
        # FP8: rows and columns of the block that an entry of the scale is for
        whole_rows, shape = (1, width), found.shape
        block = {(): (rows, width), (1,): (rows, width), (rows,): whole_rows, (rows, 1): whole_rows}.get(
            shape
        )
        if found.dtype in EXPONENTS:
            block = None
        elif block is None and len(shape) in (2, 4):  # FP8_PB_WO has [rows, 1, columns, 1]
            grid = shape[::2] if len(shape) == 4 and shape[1::2] == (1, 1) else shape
            if grid == (-(-rows // FP8_BLOCK), -(-width // FP8_BLOCK)):  # whose last blocks may be smaller
                block = (FP8_BLOCK, FP8_BLOCK)
            elif len(grid) == 2 and not rows % grid[0] and not width % grid[1]:
                block = (rows // grid[0], width // grid[1])
        if block is None or found.dtype not in _SCALES:
            raise CheckpointError(
                f"{base.folder}: {scale} is {found.dtype} {list(shape)}, which is for no channels or blocks of "
                f"{name} [{rows}, {width}]"
            )
        return Decoded("FP8", (rows, width), (name, scale), fp8_values(*block))


def _nvfp4(base: ModelFolder, names: tuple[str, str, str], rows: int, columns: int) -> Matrix | Decoded:
    for name, expected, dtype in (
        (names[1], ((rows, columns // NVFP4_BLOCK),), torch.float8_e4m3fn),
        (names[2], ((), (1,)), torch.float32),
    ):
        found = base.tensors.get(name)
        if found is None or found.shape not in expected or found.dtype != dtype or columns % NVFP4_BLOCK:
            is_so = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise CheckpointError(
                f"{base.folder}: {name} is {is_so}, expected {dtype} {list(expected[0])} for NVFP4 [{rows}, {columns}]"
            )

    def values(data: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return scaled(fp4(data), scale.float() * whole.float(), 1, NVFP4_BLOCK)

    return nvfp4(base, names, (rows, columns), False) or Decoded("NVFP4", (rows, columns), names, values)
