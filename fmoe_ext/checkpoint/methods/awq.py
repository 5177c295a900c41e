"""AWQ with four bits: words along the rows, in an order of their own, turned into int4 as compressed-tensors has it."""

import numpy as np

from fmoe_ext.checkpoint.methods.base import Array, Config, Kind, Matrix, refuse, stored, transposed
from fmoe_ext.checkpoint.methods.gptq import turned_qweight
from fmoe_ext.checkpoint.model_folder import ModelFolder

KNOWN = """
    bits w_bit version format group_size q_group_size zero_point backend modules_to_not_convert exllama_config
    do_fuse modules_to_fuse fuse_max_seq_len
"""
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # row of each four bits of a word, the lowest first


def _check(folder: str, config: Config) -> None:
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        refuse(folder, f"AWQ with {bits} bits instead of 4")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        refuse(folder, f"AWQ of version {version!r} instead of 'gemm'")


def _matrix(base: ModelFolder, stem: str) -> Matrix:
    (columns, words), _ = stored(base, f"{stem}.qweight")
    return turned_qweight(base, stem, 8 * words, columns, _awq_words, _awq_zeros)


def _awq_words(words: Array) -> Array:
    """Words along the rows [in, out / 8] -> words along the columns [out, in / 8]."""
    num_columns, num_words = words.shape
    columns = words.reshape(-1, 8, num_words)
    out = np.zeros((8, num_columns // 8, num_words), np.uint32)
    for i, row in enumerate(_AWQ_ROWS):
        for j in range(8):
            out[row] |= (columns[:, j] >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * j)
    return np.ascontiguousarray(out.transpose(2, 0, 1)).reshape(8 * num_words, -1)


def _awq_zeros(words: Array) -> Array:
    """Zero points [groups, out / 8] -> [out / 8, groups], their rows in order."""
    out = np.zeros_like(words)
    for i, row in enumerate(_AWQ_ROWS):
        out |= (words >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * row)
    return transposed(out)


AWQ = Kind((".qweight",), ".scales", (".qzeros",), KNOWN, _check, _matrix)
