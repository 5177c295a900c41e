"""GPTQ with four bits: the words of the transposed weight, turned into int4 as compressed-tensors has it."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.methods.base import (
    Array,
    Config,
    Kind,
    Matrix,
    Piece,
    Turn,
    check_groups,
    expect,
    refuse,
    stored,
    transposed,
)
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder

_QWEIGHT = MappingProxyType({"data": ".qweight", "scale": ".scales", "zero": ".qzeros"})


def turned_qweight(
    base: ModelFolder,
    stem: str,
    rows: int,
    columns: int,
    words: Callable[..., Any],
    zeros: Callable[..., Any],
) -> Matrix:
    """The matrix of a qweight: int4 once data, scale and zero are turned."""
    names = {part: stem + suffix for part, suffix in _QWEIGHT.items()}
    (groups, _), of_scale = stored(base, names["scale"])
    check_groups(base, names["scale"], columns, groups)
    if rows % 8 or columns % 8:
        raise CheckpointError(
            f"{base.folder}: {names['data']} is of {rows} x {columns}, which are no whole words"
        )
    expect(base, names["data"], base.tensors[names["data"]].shape, (torch.int32,))
    expect(base, names["scale"], (groups, rows), (torch.float16, *FLOATS))
    expect(base, names["zero"], (groups, rows // 8), (torch.int32,))
    shapes = {"data": (rows, columns // 8), "scale": (rows, groups), "zero": (rows // 8, groups)}
    dtypes = {"data": torch.int32, "scale": of_scale, "zero": torch.int32}
    turns = {"data": words, "scale": transposed, "zero": zeros}
    pieces = {
        part: Piece(
            name,
            shapes[part],
            dtypes[part],
            Turn(turns[part], base.tensors[name].shape, f"u{dtypes[part].itemsize}"),
        )
        for part, name in names.items()
    }
    return Matrix("int4", (rows, columns), pieces)


KNOWN = """
    bits desc_act checkpoint_format format is_marlin_format dynamic group_size sym damp_percent
    damp_auto_increment static_groups true_sequential lm_head model_name_or_path model_file_base_name meta
    act_group_aware backend tokenizer dataset model_seqlen block_name_to_quantize
    module_name_preceding_first_block batch_size pad_token_id max_input_length cache_block_outputs
    modules_in_block_to_quantize use_exllama exllama_config max_input_len use_cuda_fp16 disable_exllama
    cache_examples_on_gpu
"""
ONES = 0x11111111


def _check(folder: str, config: Config) -> None:
    if config.get("bits") != 4:
        refuse(folder, f"GPTQ with {config.get('bits')} bits instead of 4")
    if _gptq_format(config) not in ("gptq", "gptq_v2"):
        refuse(folder, f"GPTQ of checkpoint_format {_gptq_format(config)!r} instead of 'gptq' or 'gptq_v2'")
    if config.get("is_marlin_format"):
        refuse(folder, "GPTQ of is_marlin_format")
    for name, changes in (config.get("dynamic") or {}).items():
        if not name.startswith("-") and (changes or {}).get("bits", 4) != 4:
            refuse(folder, f"GPTQ with {changes['bits']} bits for {name!r}")


def _gptq_format(config: Config) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _matrix(base: ModelFolder, stem: str) -> Matrix:
    (words, rows), _ = stored(base, f"{stem}.qweight")
    columns = 8 * words
    config = base.quantization
    is_first = _gptq_format(config) == "gptq"  # whose zero points have 1 subtracted
    found = turned_qweight(base, stem, rows, columns, transposed, _gptq_zeros(is_first))
    _, groups = found.pieces["scale"].shape
    name = f"{stem}.g_idx"
    if name in base.tensors:
        order = base.tensors[name].read()
        expected = torch.arange(columns, dtype=order.dtype, device=order.device) // (columns // groups)
        if not torch.equal(order, expected):
            refuse(base.folder, f"GPTQ with act-order ({name} is not in the order of the columns)")
    elif config.get("desc_act"):
        refuse(base.folder, "GPTQ with act-order (desc_act)")
    return found


def _gptq_zeros(is_first: bool) -> Callable[[Array], Array]:
    """Turns zero points [groups, out / 8] into [out / 8, groups]. is_first: of the first format, which has them less 1.

    The 1 is added to whole words, as GPTQModel subtracted it.
    """
    return (lambda words: transposed(words) + np.uint32(ONES)) if is_first else transposed


GPTQ = Kind((".qweight",), ".scales", (".qzeros", ".g_idx"), KNOWN, _check, _matrix)
