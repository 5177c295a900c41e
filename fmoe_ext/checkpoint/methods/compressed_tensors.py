"""compressed-tensors' pack-quantized: four bits by group, as vLLM's llm-compressor writes them."""

from collections.abc import Iterator

import torch

from fmoe_ext.checkpoint.methods.base import (
    Config,
    Kind,
    Matrix,
    Piece,
    check_groups,
    expect,
    is_usual,
    refuse,
    stored,
)
from fmoe_ext.checkpoint.model_folder import FLOATS, Base

KNOWN = """
    format config_groups quantization_status kv_cache_scheme global_compression_ratio ignore version
    run_compressed dequantize use_optimized_inference
"""
# Parts of compressed-tensors' config_groups.
GROUP = frozenset(("targets", "weights", "format"))
WEIGHTS = frozenset(
    [
        "num_bits",
        "strategy",
        "actorder",
        "symmetric",
        "group_size",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    ]
)


def check(folder: str, config: Config) -> None:
    if config.get("format") != "pack-quantized":
        refuse(folder, f"compressed-tensors of format {config.get('format')!r} instead of 'pack-quantized'")
    for name, group in (config.get("config_groups") or {}).items():
        weights = (group or {}).get("weights") or {}
        if weights.get("num_bits") != 4 or weights.get("strategy") != "group":
            refuse(
                folder,
                f"{name} with {weights.get('num_bits')} bits by {weights.get('strategy')} instead of 4 by group",
            )
        if weights.get("actorder") not in (None, False, "weight", "static"):
            refuse(folder, f"{name} with actorder {weights.get('actorder')!r}")


def refusals(config: Config) -> Iterator[str]:
    """Settings of the groups that are not computed."""
    for name, group in (config.get("config_groups") or {}).items():
        weights = (group or {}).get("weights") or {}
        for known, part in ((GROUP, group or {}), (WEIGHTS, weights)):
            yield from (
                f"{name} with {key} {value!r}"
                for key, value in part.items()
                if key not in known and not is_usual(key, value)
            )


def matrix(base: Base, stem: str) -> Matrix:
    (rows, words), dtype = stored(base, f"{stem}.weight_packed")
    (_, groups), _ = stored(base, f"{stem}.weight_scale")
    check_groups(base, f"{stem}.weight_scale", 8 * words, groups)
    pieces = {
        "data": Piece(f"{stem}.weight_packed", (rows, words), dtype),
        "scale": expect(base, f"{stem}.weight_scale", (rows, groups), FLOATS),
    }
    zero = f"{stem}.weight_zero_point"
    if zero in base.tensors:
        pieces["zero"] = expect(base, zero, (-(-rows // 8), groups), (torch.int32,))
    return Matrix("int4", (rows, 8 * words), pieces)


COMPRESSED_TENSORS = Kind(
    ".weight_packed",
    ".weight_scale",
    (".weight_shape", ".weight_zero_point", ".k_scale", ".v_scale", ".input_scale"),
    KNOWN,
    check,
    matrix,
    refusals,
)
