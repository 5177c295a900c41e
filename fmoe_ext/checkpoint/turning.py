"""Packed tensors of GPTQ, AWQ and nested NF4 turned into what the operators decode, with the same values.

The operators take int4 as compressed-tensors has it: words along the columns of a weight [out, in], the lowest four
bits first. GPTQ has the words of the transposed weight. AWQ has words along the rows, their rows in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from fmoe_ext import frozen

Array: TypeAlias = np.ndarray[Any, Any]
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # row of each four bits of a word, the lowest first
ONES = 0x11111111


@dataclass(frozen=True)
class Turn:
    """Turns the bytes of a tensor by a function of the array. shape, dtype: of it in the file, as NumPy has them."""

    function: Callable[[Array], Array]
    shape: tuple[int, ...]
    dtype: str

    def __call__(self, data: Array) -> Array:
        """The turned array of the bytes of a file, uint8 [n]."""
        return self.function(data.view(self.dtype).reshape(self.shape))


def transposed(values: Array) -> Array:
    """[n, m] -> [m, n]."""
    return np.ascontiguousarray(values.T)


def gptq_zeros(is_first: bool) -> Callable[[Array], Array]:
    """Turns zero points [groups, out / 8] into [out / 8, groups]. is_first: of the first format, which has them less 1.

    The 1 is added to whole words, as GPTQModel subtracted it.
    """
    return (lambda words: transposed(words) + np.uint32(ONES)) if is_first else transposed


def awq_words(words: Array) -> Array:
    """Words along the rows [in, out / 8] -> words along the columns [out, in / 8]."""
    num_columns, num_words = words.shape
    columns = words.reshape(-1, 8, num_words)
    out = np.zeros((8, num_columns // 8, num_words), np.uint32)
    for i, row in enumerate(AWQ_ROWS):
        for j in range(8):
            out[row] |= (columns[:, j] >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * j)
    return np.ascontiguousarray(out.transpose(2, 0, 1)).reshape(8 * num_words, -1)


def awq_zeros(words: Array) -> Array:
    """Zero points [groups, out / 8] -> [out / 8, groups], their rows in order."""
    out = np.zeros_like(words)
    for i, row in enumerate(AWQ_ROWS):
        out |= (words >> np.uint32(4 * i) & np.uint32(15)) << np.uint32(4 * row)
    return transposed(out)


def nested_scales(absmax: torch.Tensor, code: torch.Tensor, offset: float) -> Callable[[Array], Array]:
    """Turns scales of NF4 in 8 bits, uint8 [n], into float32 [n]; see frozen.nf4_scales."""
    return lambda scales: frozen.nf4_scales(torch.from_numpy(scales), absmax, code, offset).numpy()
