"""sort_tokens, count_tokens: from the choices of a gate to rows that are grouped by expert, and their counts.

A gate says which experts a token goes to, topk_idx [T, K]; experts compute rows that lie together. Choice k of token t
has the number t * K + k; sorting these numbers by expert, stably, gives the rows:

    topk_idx [[2, 0], [1, 2]]  ->  row_idx [1, 2, 0, 3]: choice 1 of expert 0, 2 of expert 1, then both of expert 2
                                   offs    [1, 2, 4]: where the rows of each expert end
                                   inverse [[2, 0], [1, 3]]: the row of each choice

row_idx brings tokens to rows and inverse rows to tokens, each by reading, so that nothing is scattered and every sum
has one order. Dropped choices (-1) have no row; the rows that they leave over are padding at the end (row_idx -1).
Sizes do not depend on the choices, so the host need not wait for a device to know them. The operator is a counting
sort, which gives the counts too; count_tokens gives the counts alone.
"""

from typing import NamedTuple

import torch

from fmoe_ext.ops import debug
from fmoe_ext.ops._autograd import register_fake


class SortedTokens(NamedTuple):
    """Place of each choice when the rows are grouped by expert; rows at or past offs[-1] are padding."""

    tokens_per_expert: torch.Tensor  # [E] int64
    offs: torch.Tensor  # [E] int32, cumulative ends
    row_idx: torch.Tensor  # [T * K] int32, flat choice t * K + k of each row, -1 in the padding
    inverse: torch.Tensor  # [T, K] int32, row of each choice, -1 for a dropped one


def count_tokens(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Count the choices of each expert, dropped ones (-1) left out.

    topk_idx [T, K] int64 or int32, entries in [-1, num_experts) -> tokens_per_expert [E] int64.
    Raises RuntimeError for an index outside that range (on CUDA it counts as dropped unless FMOE_DEBUG=1).
    Equivalent to: torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts). FastMoE: expert_count.

    Example:

        >>> count_tokens(torch.tensor([[2, 0], [1, 2], [0, -1]]), num_experts=3)
        tensor([2, 1, 2])
    """
    if debug.wanted(topk_idx):
        debug.check(torch.ops.fmoe_ext.count_tokens, topk_idx, num_experts)
    return torch.ops.fmoe_ext.count_tokens(topk_idx, num_experts)


def count_tokens_ref(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Compute count_tokens in plain PyTorch: its oracle."""
    return torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)


def sort_tokens(topk_idx: torch.Tensor, num_experts: int) -> SortedTokens:
    """Sort the choices by expert, stably, dropped ones (-1) left out, without a host synchronisation.

    topk_idx [T, K] int64 or int32, entries in [-1, num_experts)
    -> tokens_per_expert [E] int64, offs [E] int32, row_idx [T * K] int32, inverse [T, K] int32.
    Raises RuntimeError for an index outside that range (on CUDA it counts as dropped unless FMOE_DEBUG=1).
    Equivalent to: row_idx = torch.argsort(topk_idx.flatten(), stable=True); inverse =
    torch.argsort(row_idx).view(T, K), where no choice is dropped.
    FastMoE: assign_pos.

    Example:

        >>> topk_idx = torch.tensor([[2, 0], [1, 2], [0, 2]])  # 3 tokens, 2 of 3 experts each
        >>> tokens_per_expert, offs, row_idx, inverse = sort_tokens(topk_idx, num_experts=3)
        >>> tokens_per_expert, offs
        (tensor([2, 1, 3]), tensor([2, 3, 6], dtype=torch.int32))
        >>> row_idx // 2  # the tokens of expert 0, 1 and 2
        tensor([0, 2, 1, 0, 1, 2], dtype=torch.int32)
    """
    if debug.wanted(topk_idx):
        debug.check(torch.ops.fmoe_ext.count_tokens, topk_idx, num_experts)
    return SortedTokens(*torch.ops.fmoe_ext.sort_tokens(topk_idx, num_experts))


def sort_tokens_ref(topk_idx: torch.Tensor, num_experts: int) -> SortedTokens:
    """Compute sort_tokens in plain PyTorch: its oracle."""
    flat = topk_idx.flatten().long()
    tokens_per_expert = torch.bincount(flat[flat >= 0], minlength=num_experts)
    offs = tokens_per_expert.cumsum(0).int()
    order = torch.argsort(torch.where(flat < 0, num_experts, flat), stable=True)  # dropped choices last
    rank = torch.argsort(order)  # the inverse permutation
    kept = flat >= 0
    row_idx = torch.where(kept[order], order, -1).int()
    inverse = torch.where(kept, rank, -1).int().view(topk_idx.shape)
    return SortedTokens(tokens_per_expert, offs, row_idx, inverse)


@register_fake("fmoe_ext::count_tokens", topk_idx=2)
def _(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    return topk_idx.new_empty((num_experts,), dtype=torch.int64)


@register_fake("fmoe_ext::sort_tokens", topk_idx=2)
def _(topk_idx: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    return (
        topk_idx.new_empty((num_experts,), dtype=torch.int64),
        topk_idx.new_empty((num_experts,), dtype=torch.int32),
        topk_idx.new_empty((topk_idx.numel(),), dtype=torch.int32),
        topk_idx.new_empty(topk_idx.shape, dtype=torch.int32),
    )
