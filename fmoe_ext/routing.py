"""Move tokens to the rows of their experts and back, on one rank: permute_rows(), unpermute_rows().

Experts that are not FusedExperts get their rows by them (expert_kinds.py); FusedExperts reads tokens through the
DispatchHandle of sort_choices(). Here are also the types by which a layer and its dispatch talk, on one rank
(dispatch.py) or many (ep/):

    Dispatched    tokens on their way; a sequence of chunks, each some experts with all tokens that chose them
    ExpertInput   the tokens of a chunk, once they are here
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F

from fmoe_ext import ops
from fmoe_ext.tokens import Nest, map_structure


@dataclass(frozen=True)
class DispatchHandle:
    """Rows of all choices, as sort_tokens reports them, for reading rows and for summing them."""

    tokens_per_expert: torch.Tensor  # [E] int64
    offs: torch.Tensor  # [E] int32, cumulative ends
    row_idx: torch.Tensor  # [R] int32, choice t * K + k of each row; -1 past offs[-1]
    inverse: torch.Tensor  # [T, K] int32, row of each choice; -1 if dropped


@dataclass(slots=True)
class ExpertInput:
    """Tokens that are where their experts compute, for the experts [first, end) of this rank."""

    x: Nest  # [N, *]
    topk_idx: torch.Tensor  # [N, K], experts counted from first; -1 for a choice of none of these
    topk_weights: torch.Tensor  # [N, K]
    first: int
    end: int
    # not empty: instead of [first, end), topk_idx numbers these experts of any rank, whose weights are fetched
    shadows: tuple[int, ...] = ()


class _Chunk(Protocol):
    """A part of a layer's work: some experts with all tokens that chose them."""

    def receive(self) -> ExpertInput:
        """Wait until the tokens are here."""
        ...

    def give_back(self, results: Nest) -> None:
        """Take the results of the tokens [N, *], weighted and summed over K."""
        ...


class Dispatched(Protocol):
    """Tokens on their way to experts: give_back() the results of every chunk, in order, then combine()."""

    @property
    def chunks(self) -> Sequence[_Chunk]:
        """List the parts of the work, in the order in which every rank computes them."""
        ...

    def combine(self) -> Nest:
        """Wait for the results of all chunks -> their sum for each token, [T, *]."""
        ...


def sort_choices(topk_idx: torch.Tensor, num_experts: int) -> DispatchHandle:
    """Sort the choices of a batch: topk_idx [T, K], -1 for dropped choices -> DispatchHandle. No data moves."""
    return DispatchHandle(*ops.sort_tokens(topk_idx, num_experts))


def permute_rows(x: Nest, topk_idx: torch.Tensor, num_experts: int) -> tuple[Nest, DispatchHandle]:
    """Copy every token to the rows of its experts.

    x [T, *] or a nest (list, tuple, dict) of such tensors, topk_idx [T, K] -> (rows [T * K, *] in the same nest, sorted
    by expert, DispatchHandle); rows at or past handle.offs[-1] belong to dropped choices and are zero.
    Equivalent to: x[torch.sort(topk_idx.flatten(), stable=True).indices // K] when nothing is dropped.

    Example:

        >>> x, topk_idx = torch.tensor([[10.0], [20.0], [30.0]]), torch.tensor([[1], [0], [1]])
        >>> rows, handle = permute_rows(x, topk_idx, num_experts=2)
        >>> rows.tolist(), handle.offs.tolist()
        ([[20.0], [10.0], [30.0]], [1, 3])
    """
    handle = sort_choices(topk_idx, num_experts)
    return map_structure(lambda leaf: per_row(ops.permute, leaf, handle.row_idx, handle.inverse), x), handle


def unpermute_rows(y: Nest, handle: DispatchHandle, topk_weights: torch.Tensor | None = None) -> Nest:
    """Bring rows from their experts back to the tokens and sum them, weighted by topk_weights.

    y [R, *], or its first handle.offs[-1] rows, or a nest of such tensors; handle: from permute_rows(); topk_weights
    [T, K] floating, None for ones -> [T, *] in the same nest, summed in float32 or wider; dropped choices add nothing.
    Equivalent to: (topk_weights[..., None] * y[handle.inverse]).sum(1) when nothing is dropped.

    Example:

        >>> x, topk_idx = torch.tensor([[10.0], [20.0], [30.0]]), torch.tensor([[1], [0], [1]])
        >>> rows, handle = fmoe_ext.routing.permute_rows(x, topk_idx, num_experts=2)
        >>> unpermute_rows(2 * rows, handle).tolist()
        [[20.0], [40.0], [60.0]]
    """
    num_rows = handle.row_idx.shape[0]

    def leaf(y: torch.Tensor) -> torch.Tensor:
        if y.shape[0] < num_rows:  # without the rows of dropped choices, which come last
            y = F.pad(y, (0, 0) * (y.dim() - 1) + (0, num_rows - y.shape[0]))
        return per_row(ops.unpermute, y, handle.row_idx, handle.inverse, widen(topk_weights, y.dtype))

    return map_structure(leaf, y)


@overload
def widen(topk_weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...
@overload
def widen(topk_weights: None, dtype: torch.dtype) -> None: ...
def widen(topk_weights: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Cast topk_weights to the dtype in which rows of dtype are summed: float32, or float64 for float64."""
    if topk_weights is None or (topk_weights.dtype == torch.float32 and dtype != torch.float64):
        return topk_weights
    return topk_weights.to(torch.promote_types(dtype, torch.float32))


def per_row(op: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Call op, which takes and returns matrices, on x [N, *]."""
    if x.dim() == 2:
        return op(x, *args)
    out = op(x.reshape(x.shape[0], math.prod(x.shape[1:])), *args)
    return out.reshape(out.shape[0], *x.shape[1:])
