"""Bringing tokens to their experts and back: dispatch() and combine(), each the other's backward."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fmoe_ext import ops


@dataclass(frozen=True)
class DispatchHandle:
    """Where every choice went, as sort_tokens reports it: what reading rows and combine() need."""

    tokens_per_expert: torch.Tensor  # [E] int64
    offs: torch.Tensor  # [E] int32, cumulative ends
    row_idx: torch.Tensor  # [R] int32, choice t * K + k of each row; -1 past offs[-1]
    inverse: torch.Tensor  # [T, K] int32, row of each choice; -1 if dropped


def map_structure(fn, *trees):
    """fn of corresponding tensors in equally shaped nests of lists, tuples and dicts."""
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((key, map_structure(fn, *(tree[key] for tree in trees))) for key in first)
    if isinstance(first, (list, tuple)):
        mapped = [map_structure(fn, *parts) for parts in zip(*trees, strict=True)]
        return type(first)(*mapped) if hasattr(first, "_fields") else type(first)(mapped)
    return fn(*trees)


def sort_choices(topk_idx, num_experts):
    """The handle of a batch: topk_idx [T, K], -1 for dropped choices -> DispatchHandle. No data moves."""
    return DispatchHandle(*ops.sort_tokens(topk_idx, num_experts))


def dispatch(x, topk_idx, num_experts):
    """Copies every token to the rows of its experts.

    x [T, *] or a nest (list, tuple, dict) of such tensors, topk_idx [T, K] -> (rows [R, *] in the same nest,
    DispatchHandle), R = T * K; rows at or past handle.offs[-1] belong to dropped choices and are zero.
    Equivalent to: x[torch.sort(topk_idx.flatten(), stable=True).indices // K] when nothing is dropped.
    """
    handle = sort_choices(topk_idx, num_experts)
    rows = map_structure(lambda leaf: per_row(ops.permute, leaf, handle.row_idx, handle.inverse), x)
    return rows, handle


def combine(y, handle, topk_weights=None):
    """Brings expert-major rows back to their tokens and sums them, weighted by topk_weights.

    y [R, *], or its first handle.offs[-1] rows, or a nest of such tensors; topk_weights [T, K] floating, None
    for ones -> [T, *] in the same nest, summed in float32 or wider; dropped choices add nothing.
    Equivalent to: (topk_weights[..., None] * y[handle.inverse]).sum(1) when nothing is dropped.
    """
    num_rows = handle.row_idx.shape[0]

    def leaf(y):
        if y.shape[0] < num_rows:
            y = F.pad(y, (0, 0) * (y.dim() - 1) + (0, num_rows - y.shape[0]))
        return per_row(ops.unpermute, y, handle.row_idx, handle.inverse, widen(topk_weights, y.dtype))

    return map_structure(leaf, y)


def widen(topk_weights, dtype):
    """topk_weights in the dtype in which rows of dtype are summed: float32, or float64 for float64."""
    return None if topk_weights is None else topk_weights.to(torch.promote_types(dtype, torch.float32))


def per_row(op, x, *args):
    """op, which takes and returns matrices, on x [N, *]."""
    out = op(x.reshape(x.shape[0], math.prod(x.shape[1:])), *args)
    return out.reshape(out.shape[0], *x.shape[1:])
