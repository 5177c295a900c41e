"""Read GPTQ and AWQ with four bits, rearranged into int4 as the operators and compressed-tensors have it.

    int4    data int32 [out, in / 8]       scale [out, groups]     zero int32 [out / 8, groups]
    GPTQ    qweight int32 [in / 8, out]    scales [groups, out]    qzeros int32 [groups, out / 8]
    AWQ     qweight int32 [in, out / 8]    scales [groups, out]    qzeros int32 [groups, out / 8]

A word of 32 bits has eight values. GPTQ's words go along `in`, as int4's do, so transposing is enough; its first format
has zero points less 1. AWQ's words go along `out`, in an order of their own (_AWQ_ROWS): the values are taken out of
their words and put into others.
"""

from collections.abc import Callable

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
    refuse,
    stored,
    transposed,
    unlike,
)
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder

_ONES = 0x11111111  # 1 in each of a word's eight values
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 rows (outputs) each four bits of a word are, lowest first


def _turned(
    base: ModelFolder,
    stem: str,
    rows: int,
    columns: int,
    words: Callable[[Array], Array],
    zeros: Callable[[Array], Array],
) -> Matrix:
    """Describe the matrix of a qweight as int4. words, zeros: rearrange qweight and qzeros of the file."""
    data, scale, zero = (f"{stem}.{leaf}" for leaf in ("qweight", "scales", "qzeros"))
    (groups, _), of_scale = stored(base, scale)
    if groups == 0 or columns % groups or columns // groups % 32:
        raise CheckpointError(
            f"{base.folder}: {scale} has {groups} groups for {columns} columns: groups of a multiple of 32 are computed"
        )
    # words of eight values, along both dimensions: data has them along columns, zero points along rows
    if rows % 8 or columns % 8:
        raise CheckpointError(f"{base.folder}: {data} is of {rows} x {columns}, which are no whole words")
    given = base.tensors[data].shape
    pieces = {}
    # (piece, its name, shape in the file, dtypes, shape of int4, function that rearranges it)
    for part, name, in_file, dtypes, shape, turn in (
        ("data", data, given, (torch.int32,), (rows, columns // 8), words),
        ("scale", scale, (groups, rows), (torch.float16, *FLOATS), (rows, groups), transposed),
        ("zero", zero, (groups, rows // 8), (torch.int32,), (rows // 8, groups), zeros),
    ):
        found, dtype = stored(base, name)
        if found != in_file or dtype not in dtypes:
            raise unlike(base, name, f"{dtypes[0]} {list(in_file)}")
        pieces[part] = Piece(name, shape, dtype, Turn(turn, found, f"u{dtype.itemsize}"))
    return Matrix("int4", (rows, columns), pieces)


class Gptq(Kind):
    data = (".qweight",)
    scale = ".scales"
    others = (".qzeros", ".g_idx")
    known = """
        bits desc_act checkpoint_format format is_marlin_format dynamic group_size sym damp_percent
        damp_auto_increment static_groups true_sequential lm_head model_name_or_path model_file_base_name meta
        act_group_aware backend tokenizer dataset model_seqlen block_name_to_quantize
        module_name_preceding_first_block batch_size pad_token_id max_input_length cache_block_outputs
        modules_in_block_to_quantize use_exllama exllama_config max_input_len use_cuda_fp16 disable_exllama
        cache_examples_on_gpu
    """

    def check(self, folder: str, config: Config) -> None:
        if config.get("bits") != 4:
            refuse(folder, f"GPTQ with {config.get('bits')} bits instead of 4")
        if _gptq_format(config) not in ("gptq", "gptq_v2"):
            refuse(
                folder, f"GPTQ of checkpoint_format {_gptq_format(config)!r} instead of 'gptq' or 'gptq_v2'"
            )
        if config.get("is_marlin_format"):
            refuse(folder, "GPTQ of is_marlin_format")
        for name, changes in (config.get("dynamic") or {}).items():
            if not name.startswith("-") and (changes or {}).get("bits", 4) != 4:
                refuse(folder, f"GPTQ with {changes['bits']} bits for {name!r}")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix:
        (words, rows), _ = stored(base, f"{stem}.qweight")
        columns, config = 8 * words, base.quantization
        is_first = _gptq_format(config) == "gptq"  # has zero points less 1; gptq_v2 has them as they are

        def zeros(words: Array) -> Array:
            # added to whole words with their carries, because GPTQModel subtracted it from whole words
            return transposed(words) + np.uint32(_ONES if is_first else 0)

        found = _turned(base, stem, rows, columns, transposed, zeros)
        _, groups = found.pieces["scale"].shape
        name = f"{stem}.g_idx"
        # Columns quantised in the order of their activations (act-order) have groups that are not side by side
        if name in base.tensors:
            order = base.tensors[name].read()
            expected = torch.arange(columns, dtype=order.dtype, device=order.device) // (columns // groups)
            if not torch.equal(order, expected):
                refuse(base.folder, f"GPTQ with act-order ({name} is not in the order of the columns)")
        elif config.get("desc_act"):
            refuse(base.folder, "GPTQ with act-order (desc_act)")
        return found


def _gptq_format(config: Config) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


class Awq(Kind):
    data = (".qweight",)
    scale = ".scales"
    others = (".qzeros",)
    known = """
        bits w_bit version format group_size q_group_size zero_point backend modules_to_not_convert exllama_config
        do_fuse modules_to_fuse fuse_max_seq_len
    """

    def check(self, folder: str, config: Config) -> None:
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            refuse(folder, f"AWQ with {bits} bits instead of 4")
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if version != "gemm":
            refuse(folder, f"AWQ of version {version!r} instead of 'gemm'")

    def matrix(self, base: ModelFolder, stem: str) -> Matrix:
        def turn_words(words: Array) -> Array:
            # words along `out` [in, out / 8] -> words along `in` [out, in / 8]
            num_columns, num_words = words.shape
            columns = words.reshape(-1, 8, num_words)
            out = np.zeros((8, num_columns // 8, num_words), np.uint32)
            for i, row in enumerate(_AWQ_ROWS):
                for j in range(8):
                    out[row] |= (columns[:, j] >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * j)
            return np.ascontiguousarray(out.transpose(2, 0, 1)).reshape(8 * num_words, -1)

        def turn_zeros(words: Array) -> Array:  # [groups, out / 8] -> [out / 8, groups], their rows in order
            out = np.zeros_like(words)
            for i, row in enumerate(_AWQ_ROWS):
                out |= (words >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * row)
            return transposed(out)

        (columns, words), _ = stored(base, f"{stem}.qweight")
        return _turned(base, stem, 8 * words, columns, turn_words, turn_zeros)
