"""Describe how tensors of Transformers become tensors of a GGUF file, and back: names and functions for both ways.

Architecture.tensors() has a TensorTransform for each tensor; reading.py calls its read(), writing.py its write().
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_WEIGHTS = tuple(f"ffn_{role}_exps.weight" for role in ("gate", "up", "down"))
_BIASES = tuple(f"ffn_{role}_exps.bias" for role in ("gate", "up", "down"))


class TensorTransform(NamedTuple):
    """Names and functions by which a tensor of Transformers is one or more tensors of a file."""

    parts: tuple[str, ...]  # names in the file, those of a layer without blk.N.
    read: Callable[..., Tensor]  # parts -> tensor
    write: Callable[[Tensor], tuple[Tensor, ...]]  # tensor -> parts
    has_rows: bool = False  # both only move whole rows, so packed rows can stay packed


def one(part: str, read: Any, write: Any, has_rows: bool = False) -> TensorTransform:
    """Describe a tensor that is one tensor in the file, too, with other values or another shape."""
    return TensorTransform((part,), read, lambda w: (write(w),), has_rows)


def renamed(part: str) -> TensorTransform:
    """Describe a tensor that the file has as it is, under another name."""
    return one(part, lambda w: w, lambda w: w, True)


def plus_one(part: str) -> TensorTransform:
    """Describe the weight w of a norm that Transformers multiplies by 1 + w, and llama.cpp by what the file has."""
    return one(part, lambda w: w - 1, lambda w: w.double() + 1)  # in float64: the sum is rounded once


def row(part: str) -> TensorTransform:
    """Describe a row [1, D] that is [D] in the file; one that is [1, D] there is read too."""
    return one(part, lambda w: w.reshape(1, -1), Tensor.flatten)


def pairs(part: str, heads: int) -> TensorTransform:
    """Describe rows of queries or keys: Transformers rotates halves of a head, llama.cpp's graph neighbours."""
    return one(
        part,
        lambda w: w.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2),
        lambda w: w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2),
        True,
    )


def convolution(part: str) -> TensorTransform:
    """Describe weights [channels, 1, taps] that are [channels, taps] in the file."""
    return one(part, lambda w: w[:, None], lambda w: w[:, 0])


def log(a: Tensor) -> Tensor:
    """Return A_log from the decays -exp(A_log) that a file has."""
    return (-a).log()


def exp(a: Tensor) -> Tensor:
    """Return the decays -exp(A_log), which a file has; computed in float64, rounded once."""
    return -a.double().exp().to(a.dtype)


def halves(first: str, second: str, dim: int = 0) -> TensorTransform:
    """Describe two tensors of a file that Transformers has joined along dim."""
    return TensorTransform(
        (first, second), lambda *parts: torch.cat(parts, dim), lambda w: w.chunk(2, dim), dim == 0
    )


def of_experts(prefix: str, gated: bool, interleaved: bool) -> dict[str, TensorTransform]:
    """Return the transforms of stacked experts, whose gate and up are apart in the file.

    interleaved: Transformers has [E, in, out] with columns gate, up, gate, up, ..., and biases [E, out] (GPT-OSS).
    """
    # [E, rows, in] each
    gate, up, down = _WEIGHTS
    if not gated:
        return {f"{prefix}up_proj": renamed(up), f"{prefix}down_proj": renamed(down)}
    # gate and up are halves of the rows [E, 2H, in]
    if not interleaved:
        return {f"{prefix}gate_up_proj": halves(gate, up, 1), f"{prefix}down_proj": renamed(down)}
    return {
        f"{prefix}gate_up_proj": TensorTransform(
            (gate, up),
            lambda *parts: torch.stack([w.mT for w in parts], -1).flatten(2),
            lambda w: (w[..., ::2].mT, w[..., 1::2].mT),
        ),
        f"{prefix}down_proj": one(down, lambda w: w.mT, lambda w: w.mT),
        f"{prefix}gate_up_proj_bias": TensorTransform(
            _BIASES[:2], lambda *parts: torch.stack(parts, -1).flatten(1), lambda w: (w[:, ::2], w[:, 1::2])
        ),
        f"{prefix}down_proj_bias": renamed(_BIASES[2]),
    }
