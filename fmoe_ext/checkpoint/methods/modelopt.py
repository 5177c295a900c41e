"""NVIDIA's Model Optimizer: NVFP4, FP8 and MXFP8, each layer as its tensors say."""

from __future__ import annotations

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    NVFP4_BLOCK,
    Config,
    Kind,
    Matrix,
    nvfp4,
    refuse,
    stored,
    tensor_of,
)
from fmoe_ext.checkpoint.methods.decoded import Decoded, fp4, scaled
from fmoe_ext.checkpoint.methods.fp8 import EXPONENTS, FP8_BLOCK, fp8_values, is_mxfp8, mxfp8
from fmoe_ext.checkpoint.model_folder import ModelFolder

KNOWN = """
    config_groups ignore exclude_modules quant_algo kv_cache_scheme kv_cache_quant_algo producer group_size
    quantized_layers
"""
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def _check(folder: str, config: Config) -> None:
    layers = config.get("quantized_layers") or {}
    mixed = config.get("quant_algo") == "MIXED_PRECISION"
    found = (
        {(layer or {}).get("quant_algo") for layer in layers.values()}
        if mixed
        else {config.get("quant_algo")}
    )
    for name in sorted(map(str, found - {None})):
        if name not in _ALGORITHMS:
            refuse(folder, f"modelopt with quant_algo {name!r}")


def _matrix(base: ModelFolder, stem: str) -> Matrix | Decoded:
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
    blocks = {(): (rows, width), (1,): (rows, width), (rows,): (1, width), (rows, 1): (1, width)}
    block = blocks.get(found.shape)
    if is_mxfp8(found, rows, width):
        return mxfp8(name, scale, rows, width)
    if found.dtype in EXPONENTS:
        block = None
    elif block is None and len(found.shape) in (2, 4):  # FP8_PB_WO has [rows, 1, columns, 1]
        grid = found.shape[::2] if len(found.shape) == 4 and found.shape[1::2] == (1, 1) else found.shape
        if grid == (-(-rows // FP8_BLOCK), -(-width // FP8_BLOCK)):  # whose last blocks may be smaller
            block = (FP8_BLOCK, FP8_BLOCK)
        elif len(grid) == 2 and not rows % grid[0] and not width % grid[1]:
            block = (rows // grid[0], width // grid[1])
    if block is None or found.dtype not in SCALES:
        raise CheckpointError(
            f"{base.folder}: {scale} is {found.dtype} {list(found.shape)}, which is for no channels or blocks of "
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


MODELOPT = Kind(
    (".weight",),
    ".weight_scale",
    (".weight_scale_2", ".input_scale", ".k_scale", ".v_scale", ".pre_quant_scale"),
    KNOWN,
    _check,
    _matrix,
)
