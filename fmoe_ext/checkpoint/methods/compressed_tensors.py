"""Read compressed-tensors, which vLLM's llm-compressor writes: each layer's tensors say how it is packed.

weight_packed int32    integers of 1 to 8 bits, in each row a stream of bits in words; weight_shape has the columns
weight_packed uint8    two numbers of E2M1 a byte: MXFP4 by exponents, NVFP4 by scales and weight_global_scale
weight                 a number in each byte, FP8 or int8; with exponents MXFP8

Beside them lie weight_scale [rows, groups], [rows], [1] or of blocks, and perhaps weight_zero_point.
CompressedTensors.matrix() describes a layer's as a Matrix or as Decoded (base.py).

Older versions put 32 // bits whole numbers in a word. That is the same for 1, 2, 4 and 8 bits; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    NVFP4_BLOCK,
    Config,
    Decoded,
    Kind,
    Matrix,
    Piece,
    e8m0,
    fp4,
    is_usual,
    nvfp4,
    refuse,
    scaled,
    stored,
    tensor_of,
    unlike,
)
from fmoe_ext.checkpoint.methods.fp8 import MX_BLOCK, is_mxfp8, mxfp8
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder

# {format that is read: the type of its numbers, None: any}; a mixed one names a format in each group
_FORMATS: Mapping[str, str | None] = MappingProxyType(
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
# Parts of config_groups that are read or change no weight. Those of activations round inputs, which is not computed
_GROUP = frozenset(("targets", "weights", "format", "input_activations", "output_activations"))
_WEIGHTS = frozenset(
    [
        "num_bits", "strategy", "actorder", "symmetric", "group_size", "block_structure", "type",
        "observer", "observer_kwargs", "scale_dtype", "zp_dtype",
    ]
)  # fmt: skip
# {setting that is computed with: its types}; a list is of whole numbers
_TYPES: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {"num_bits": int, "group_size": int, "symmetric": int, "block_structure": (list, str)}
)


class CompressedTensors(Kind):
    data = (".weight_packed", ".weight")
    scale = ".weight_scale"
    others = (
        ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx",
        ".k_scale", ".v_scale", ".input_scale", ".input_global_scale", ".input_zero_point",
    )  # fmt: skip
    known = """
        format config_groups quantization_status kv_cache_scheme global_compression_ratio ignore version
        run_compressed dequantize use_optimized_inference
    """

    def check(self, folder: str, config: Config) -> None:
        groups = (config.get("config_groups") or {}).items()
        kinds = {name: str((group or {}).get("format") or config.get("format")) for name, group in groups}
        for kind in (config.get("format"), *kinds.values()):
            if kind not in _FORMATS:
                refuse(folder, f"compressed-tensors of format {kind!r}")
        for name, group in groups:
            weights = (group or {}).get("weights") or {}
            # with these the file has the columns in their own order; "group" needs weight_g_idx
            if weights.get("actorder") not in (None, False, "weight", "static"):
                refuse(folder, f"{name} with actorder {weights.get('actorder')!r}")
            for key, kind in _TYPES.items():
                value = weights.get(key)
                items = value if isinstance(value, list) else ()
                if value is not None and not (isinstance(value, kind) and {*map(type, items)} <= {int}):
                    raise ValueError(f"{name} with {key} {value!r}")
            numbers = weights.get("type") or "int"
            if _FORMATS[kinds[name]] not in (None, numbers):
                refuse(folder, f"{name} with type {numbers!r} in format {kinds[name]!r}")
            for known, part in ((_GROUP, group or {}), (_WEIGHTS, weights)):
                for key, value in part.items():
                    if key not in known and not is_usual(key, value):
                        refuse(folder, f"quantization_config with {name} with {key} {value!r}")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix | Decoded:
        packed, plain = (stem + leaf for leaf in self.data)
        _, dtype = stored(base, packed if packed in base.tensors else plain)
        if f"{stem}.weight_g_idx" in base.tensors:
            refuse(base.folder, f"{stem}.weight_g_idx, an order of the columns by activations")
        if packed not in base.tensors:
            return _bytes(base, stem)
        return _integers(base, stem) if dtype == torch.int32 else _fp4(base, stem)


def _fp4(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """Describe mxfp4-pack-quantized and nvfp4-pack-quantized: two values a byte."""
    name, scale, whole = (f"{stem}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    (rows, num_bytes), dtype = stored(base, name)
    (_, groups), of_scale = stored(base, scale)
    columns = 2 * num_bytes
    block = NVFP4_BLOCK if whole in base.tensors else MX_BLOCK
    if dtype != torch.uint8 or columns != block * groups or base.tensors[scale].shape[0] != rows:
        raise unlike(base, scale, f"[{rows}, {columns // block}] for {name} {dtype} [{rows}, {num_bytes}]")
    if block == MX_BLOCK and of_scale == torch.uint8:
        pieces = {
            "data": Piece(name, (rows, num_bytes), dtype),
            "scale": Piece(scale, (rows, groups), of_scale),
        }
        return Matrix("mxfp4", (rows, columns), pieces)
    if block == MX_BLOCK or of_scale != torch.float8_e4m3fn or base.tensors[whole].shape not in ((), (1,)):
        raise unlike(base, scale, f"uint8, or torch.float8_e4m3fn and {whole} of one number")

    def values(data: torch.Tensor, scale: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return scaled(fp4(data), scale.float() / whole.float(), 1, NVFP4_BLOCK)

    # an operator takes NVFP4 with a float32 number for the matrix; else it is decoded
    names, shape = (name, scale, whole), (rows, columns)
    packed = nvfp4(base, names, shape, True) if base.tensors[whole].dtype == torch.float32 else None
    return packed or Decoded("nvfp4-pack-quantized", shape, names, values)


def _integers(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """Describe pack-quantized: integers of one to eight bits in words of 32."""
    name, scale, zero, shape = (
        f"{stem}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape")
    )
    (rows, words), dtype = stored(base, name)
    of_scale = tensor_of(base, scale)
    groups = of_scale.shape[1] if len(of_scale.shape) == 2 else 1
    bits, columns = _bits_and_columns(base, shape, words)
    grid = (rows, groups)
    # Without zero points integers are symmetric: a folder that says otherwise has lost them
    if zero not in base.tensors and _weights(base, "symmetric") == {False}:
        raise CheckpointError(f"{base.folder} lacks {zero}")
    if columns % groups or of_scale.dtype not in FLOATS or of_scale.shape not in (grid, (1,), (rows,)):
        raise unlike(base, scale, f"a floating dtype [{rows}, groups] for {name} of {rows} x {columns}")
    zero_rows = -(-rows * bits // 32)  # words that hold the zero points of a column of groups
    if zero in base.tensors and stored(base, zero) != ((zero_rows, groups), torch.int32):
        raise unlike(base, zero, f"torch.int32 [{zero_rows}, {groups}]")
    # int4 is the layout of the operators, with groups of a multiple of 32 columns
    if bits == 4 and columns % 8 == 0 and columns // groups % 32 == 0 and of_scale.shape == grid:
        pieces = {"data": Piece(name, (rows, words), dtype), "scale": Piece(scale, grid, of_scale.dtype)}
        if zero in base.tensors:
            pieces["zero"] = Piece(zero, (zero_rows, groups), torch.int32)
        return Matrix("int4", (rows, columns), pieces)

    def values(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        # values and zero points are stored with 2^(bits - 1) added, to be unsigned: it cancels in the difference
        numbers = _unpacked(data, bits, columns).unflatten(1, (groups, -1))
        least = 2 ** (bits - 1) if zero is None else _unpacked(zero.T, bits, rows).T[..., None]
        # a scale for each row, for all, or for each group
        of_rows = scale.dim() == 1 and len(scale) > 1
        of_group = scale.float()[:, None] if of_rows else scale.float().expand(grid)
        return ((numbers - least).float() * of_group[..., None]).flatten(1)

    names = (name, scale, zero) if zero in base.tensors else (name, scale)
    return Decoded("pack-quantized", (rows, columns), names, values)


def _unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack int32 [n, words], each row a stream of integers of some bits, lowest first -> int32 [n, count]."""
    data: np.ndarray[Any, Any] = words.contiguous().view(torch.uint8).numpy()
    if bits == 8:
        return torch.from_numpy(data)[:, :count].int()
    stream = np.unpackbits(data, axis=1, bitorder="little")[:, : count * bits]
    weights = (1 << np.arange(bits)).astype(np.uint8)
    return torch.from_numpy(stream.reshape(len(data), count, bits) @ weights).int()


def _bits_and_columns(base: ModelFolder, name: str, words: int) -> tuple[int, int]:
    """Find (bits of a number, columns) of a matrix with `words` words a row, from weight_shape and the settings."""
    found = _weights(base, "num_bits") - {None}
    if name not in base.tensors:  # as the library wrote before it had weight_shape, in whole numbers a word
        if len(found) == 1 and (bits := found.pop()) in (1, 2, 4, 8):
            return bits, 32 * words // bits
        raise CheckpointError(f"{base.folder} lacks {name}")
    shape = base.tensors[name]
    columns = int(shape.read().tolist()[1]) if shape.shape == (2,) else 0
    # A mixed folder says several numbers of bits: one must fit this matrix
    fitting = [
        bits for bits in sorted(found) or range(1, 9) if columns > 0 and -(-columns * bits // 32) == words
    ]
    if len(fitting) != 1 or not 1 <= fitting[0] <= 8:
        is_old = any(1 <= bits <= 8 and -(-columns // (32 // bits)) == words for bits in found)
        raise CheckpointError(
            f"{base.folder}: {name} has {columns} columns, which are no {words} words of {sorted(found)} bits"
            f"{'; an older compressed-tensors has packed them: quantise the model anew' if is_old else ''}"
        )
    return fitting[0], columns


def _bytes(base: ModelFolder, stem: str) -> Matrix | Decoded:
    """Describe float-quantized, int-quantized and mxfp8-quantized: a number in each byte."""
    name, scale, zero = (f"{stem}.weight{part}" for part in ("", "_scale", "_zero_point"))
    (rows, columns), dtype = stored(base, name)
    found = tensor_of(base, scale)
    if dtype not in (torch.float8_e4m3fn, torch.int8):
        raise CheckpointError(f"{base.folder}: {name} is {dtype}, expected torch.float8_e4m3fn or torch.int8")
    if found.dtype not in (*FLOATS, torch.uint8) or len(found.shape) > 2:
        raise unlike(base, scale, "a floating dtype or uint8, with at most two dimensions")
    grid = (*found.shape, 1, 1)[:2] if found.shape != (1,) else (1, 1)
    # block: rows and columns that an entry of the scale is for, the first of the usual and the settings' that fits
    said = [tuple(block or ()) for block in _weights(base, "block_structure")]
    sizes = [(1, size or 0) for size in _weights(base, "group_size")]
    for block in ((rows, columns), (1, columns), *said, *sizes, (1, MX_BLOCK)):
        whole = len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if whole and grid == (-(-rows // block[0]), -(-columns // block[1])):
            break
    else:
        raise unlike(base, scale, f"a tensor for the channels, groups or blocks of {[rows, columns]}")
    if dtype == torch.float8_e4m3fn and zero not in base.tensors and is_mxfp8(found, rows, columns):
        return mxfp8(name, scale, rows, columns)

    def values(data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> torch.Tensor:
        numbers = data.float()
        if zero is not None and dtype != torch.int8 and zero.float().any():
            raise CheckpointError(f"{base.folder}: {stem}.weight is FP8, whose zero points must be 0")
        if zero is not None and dtype == torch.int8:
            numbers = numbers - scaled(torch.ones_like(numbers), zero.float().reshape(grid), *block)
        return scaled(numbers, e8m0(scale).reshape(grid), *block)

    if zero not in base.tensors and dtype == torch.int8 and _weights(base, "symmetric") == {False}:
        raise CheckpointError(f"{base.folder} lacks {zero}")
    if zero in base.tensors and base.tensors[zero].shape != found.shape:
        raise unlike(base, zero, f"{list(found.shape)}")
    names = (name, scale, zero) if zero in base.tensors else (name, scale)
    return Decoded(f"{'int' if dtype == torch.int8 else 'float'}-quantized", (rows, columns), names, values)


def _weights(base: ModelFolder, key: str) -> set[Any]:
    """Collect the values that a setting of weights has in the groups of quantization_config."""
    groups = (base.quantization.get("config_groups") or {}).values()
    values = (((group or {}).get("weights") or {}).get(key) for group in groups)
    return {tuple(value) if isinstance(value, list) else value for value in values}
