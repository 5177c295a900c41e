"""compressed-tensors, as vLLM's llm-compressor writes it: each layer's tensors say how it is packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    NVFP4_BLOCK,
    Config,
    Kind,
    Matrix,
    Piece,
    is_usual,
    nvfp4,
    refuse,
    stored,
    tensor_of,
)
from fmoe_ext.checkpoint.methods.decoded import Decoded, e8m0, fp4, scaled, unpacked
from fmoe_ext.checkpoint.methods.fp8 import MX_BLOCK, is_mxfp8, mxfp8
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder

KNOWN = """
    format config_groups quantization_status kv_cache_scheme global_compression_ratio ignore version
    run_compressed dequantize use_optimized_inference
"""
# Formats that are read, with the type of their numbers; a mixed one names another format in each group.
FORMATS: Mapping[str, str | None] = MappingProxyType(
    {
        "pack-quantized": "int",
        "int-quantized": "int",
        "float-quantized": "float",
        "naive-quantized": None,
        "mxfp4-pack-quantized": "float",
        "mxfp8-quantized": "float",
        "nvfp4-pack-quantized": "float",
        "mixed-precision": None,
        "dense": None,
    }
)
# Parts of compressed-tensors' config_groups. Those of activations round inputs, which is not computed.
GROUP = frozenset(("targets", "weights", "format", "input_activations", "output_activations"))
WEIGHTS = frozenset(
    [
        "num_bits", "strategy", "actorder", "symmetric", "group_size", "block_structure", "type",
        "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
    ]
)  # fmt: skip
PACKED, PLAIN = ".weight_packed", ".weight"


def _check(folder: str, config: Config) -> None:
    _check_format(folder, config.get("format"))
    for name, group in (config.get("config_groups") or {}).items():
        kind = str((group or {}).get("format") or config.get("format"))
        _check_format(folder, kind)
        weights = (group or {}).get("weights") or {}
        if weights.get("actorder") not in (None, False, "weight", "static"):
            refuse(folder, f"{name} with actorder {weights.get('actorder')!r}")
        numbers = weights.get("type") or "int"
        if FORMATS[kind] not in (None, numbers):
            refuse(folder, f"{name} with type {numbers!r} in format {kind!r}")


def _check_format(folder: str, name: Any) -> None:
    if name not in FORMATS:
        refuse(folder, f"compressed-tensors of format {name!r}")


def _refusals(config: Config) -> Iterator[str]:
    """Settings of the groups that are not computed."""
    for name, group in (config.get("config_groups") or {}).items():
        weights = (group or {}).get("weights") or {}
        for known, part in ((GROUP, group or {}), (WEIGHTS, weights)):
            yield from (
                f"{name} with {key} {value!r}"
                for key, value in part.items()
                if key not in known and not is_usual(key, value)
            )


def _matrix(base: ModelFolder, stem: str) -> Matrix | Decoded:
    name = stem + (PACKED if stem + PACKED in base.tensors else PLAIN)
    _, dtype = stored(base, name)
    if f"{stem}.weight_g_idx" in base.tensors:
        refuse(base.folder, f"{stem}.weight_g_idx, an order of the columns by activations")
    if name.endswith(PLAIN):
        return _naive(base, stem)
    return _integers(base, stem) if dtype == torch.int32 else _fp4(base, stem)


def _fp4(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """mxfp4-pack-quantized and nvfp4-pack-quantized: two values a byte."""
    name, scale, whole = (f"{stem}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    (rows, num_bytes), dtype = stored(base, name)
    (_, groups), of_scale = stored(base, scale)
    columns = 2 * num_bytes
    block = NVFP4_BLOCK if whole in base.tensors else MX_BLOCK
    if dtype != torch.uint8 or columns != block * groups or base.tensors[scale].shape[0] != rows:
        raise _unlike(base, scale, f"[{rows}, {columns // block}] for {name} {dtype} [{rows}, {num_bytes}]")
    if block == MX_BLOCK and of_scale == torch.uint8:
        pieces = {
            "data": Piece(name, (rows, num_bytes), dtype),
            "scale": Piece(scale, (rows, groups), of_scale),
        }
        return Matrix("mxfp4", (rows, columns), pieces)
    if block == MX_BLOCK or of_scale != torch.float8_e4m3fn or base.tensors[whole].shape not in ((), (1,)):
        raise _unlike(base, scale, f"uint8, or torch.float8_e4m3fn and {whole} of one number")

    def values(data: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return scaled(fp4(data), scale.float() / whole.float(), 1, NVFP4_BLOCK)

    names, shape = (name, scale, whole), (rows, columns)
    packed = nvfp4(base, names, shape, True) if base.tensors[whole].dtype == torch.float32 else None
    return packed or Decoded("nvfp4-pack-quantized", shape, names, values)


def _integers(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """pack-quantized: integers of one to eight bits in words of 32."""
    name, scale, zero, shape = (
        f"{stem}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape")
    )
    (rows, words), dtype = stored(base, name)
    of_scale = tensor_of(base, scale)
    groups = of_scale.shape[1] if len(of_scale.shape) == 2 else 1
    bits, columns = _bits_and_columns(base, shape, words)
    grid = (rows, groups)
    if zero not in base.tensors and _weights(base, "symmetric") == {False}:
        raise CheckpointError(f"{base.folder} lacks {zero}")
    if columns % groups or of_scale.dtype not in FLOATS or of_scale.shape not in (grid, (1,), (rows,)):
        raise _unlike(base, scale, f"a floating dtype [{rows}, groups] for {name} of {rows} x {columns}")
    zero_rows = -(-rows * bits // 32)
    if zero in base.tensors and stored(base, zero) != ((zero_rows, groups), torch.int32):
        raise _unlike(base, zero, f"torch.int32 [{zero_rows}, {groups}]")
    if bits == 4 and columns % 8 == 0 and columns // groups % 32 == 0 and of_scale.shape == grid:
        pieces = {"data": Piece(name, (rows, words), dtype), "scale": Piece(scale, grid, of_scale.dtype)}
        if zero in base.tensors:
            pieces["zero"] = Piece(zero, (zero_rows, groups), torch.int32)
        return Matrix("int4", (rows, columns), pieces)

    def values(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        # Values and zero points are both stored with the same number added.
        numbers = unpacked(data, bits, columns).unflatten(1, (groups, -1))
        least = 2 ** (bits - 1) if zero is None else unpacked(zero.T, bits, rows).T[..., None]
        of_group = (
            scale.float().expand(grid) if scale.dim() != 1 or len(scale) == 1 else scale.float()[:, None]
        )
        return ((numbers - least).float() * of_group[..., None]).flatten(1)

    names = (name, scale, zero) if zero in base.tensors else (name, scale)
    return Decoded("pack-quantized", (rows, columns), names, values)


def _bits_and_columns(base: ModelFolder, name: str, words: int) -> tuple[int, int]:
    """Bits of a number, and columns of a matrix of so many words a row, which weight_shape has."""
    found = _weights(base, "num_bits") - {None}
    if name not in base.tensors:  # as the library wrote before it had weight_shape
        if len(found) == 1 and 1 <= (bits := found.pop()) <= 8:
            return bits, 32 * words // bits
        raise CheckpointError(f"{base.folder} lacks {name}")
    shape = base.tensors[name]
    columns = int(shape.read().tolist()[1]) if shape.shape == (2,) else 0
    fitting = [
        bits for bits in sorted(found) or range(1, 9) if columns > 0 and -(-columns * bits // 32) == words
    ]
    if len(fitting) != 1 or not 1 <= fitting[0] <= 8:
        raise CheckpointError(
            f"{base.folder}: {name} has {columns} columns, which are no {words} words of {sorted(found)} bits"
        )
    return fitting[0], columns


def _naive(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """float-quantized, int-quantized and mxfp8-quantized: a number in each byte."""
    name, scale, zero = (f"{stem}.weight{part}" for part in ("", "_scale", "_zero_point"))
    (rows, columns), dtype = stored(base, name)
    found = tensor_of(base, scale)
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        raise CheckpointError(f"{base.folder}: {name} is {dtype}, expected torch.float8_e4m3fn or torch.int8")
    if found.dtype not in (*FLOATS, torch.uint8) or len(found.shape) > 2:
        raise _unlike(base, scale, "a floating dtype or uint8, with at most two dimensions")
    grid = (*found.shape, 1, 1)[:2] if found.shape != (1,) else (1, 1)
    block = _block(base, scale, (rows, columns), grid)
    if dtype == torch.float8_e4m3fn and zero not in base.tensors and is_mxfp8(found, rows, columns):
        return mxfp8(name, scale, rows, columns)

    def values(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        numbers = data.float()
        if zero is not None and dtype == torch.int8:
            numbers = numbers - scaled(torch.ones_like(numbers), zero.float().reshape(grid), *block)
        return scaled(numbers, e8m0(scale).reshape(grid), *block)

    if zero not in base.tensors and dtype == torch.int8 and _weights(base, "symmetric") == {False}:
        raise CheckpointError(f"{base.folder} lacks {zero}")
    if zero in base.tensors and base.tensors[zero].shape != found.shape:
        raise _unlike(base, zero, f"{list(found.shape)}")
    names = (name, scale, zero) if zero in base.tensors else (name, scale)
    return Decoded("float-quantized", (rows, columns), names, values)


def _weights(base: ModelFolder, key: str) -> set[Any]:
    """The values that a setting of weights has in all groups."""
    groups = (base.quantization.get("config_groups") or {}).values()
    values = (((group or {}).get("weights") or {}).get(key) for group in groups)
    return {tuple(value) if isinstance(value, list) else value for value in values}


def _block(base: ModelFolder, name: str, shape: tuple[int, int], grid: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a matrix that an entry of its scale is for."""
    said = [tuple(block or ()) for block in _weights(base, "block_structure")]
    sizes = [(1, size or 0) for size in _weights(base, "group_size")]
    for block in (shape, (1, shape[1]), *said, *sizes, (1, MX_BLOCK)):
        whole = len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if whole and grid == tuple(-(-n // m) for n, m in zip(shape, block, strict=True)):
            return block[0], block[1]
    raise _unlike(base, name, f"a tensor for the channels, groups or blocks of {list(shape)}")


def _unlike(base: ModelFolder, name: str, expected: str) -> CheckpointError:
    found = base.tensors.get(name)
    is_so = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
    return CheckpointError(f"{base.folder}: {name} is {is_so}, expected {expected}")


COMPRESSED_TENSORS = Kind(
    (PACKED, PLAIN),
    ".weight_scale",
    (
        ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx",
        ".k_scale", ".v_scale", ".input_scale", ".input_global_scale", ".input_zero_point",
    ),
    KNOWN,
    _check,
    _matrix,
    _refusals,
)  # fmt: skip
