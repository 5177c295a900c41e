"""balanced_shares: Sinkhorn's iteration on the logits of SinkhornGate, over the tokens of all ranks.

The matrix exp(logits) [T, E] becomes diag(of_token) exp(logits) diag(of_expert), with factors that make every row and
every column sum up evenly: each token has as much to give, and each expert is given as much. Rows and columns are
scaled in turn, which spoils the other a little less each time, until the experts' factors stay.
"""

from collections.abc import Callable

import torch

from fmoe_ext.ops._autograd import custom_op, register_fake, register_not_differentiable

_TOLERANCE = 1e-4  # it ends when the experts' factors change no more than this in a round, in the mean
_EPSILON = 1e-8  # added to sums, against a division by 0
_MAX_ROUNDS = 1000  # for logits that do not converge


def balanced_shares(logits: torch.Tensor, gather: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
    """Scale rows and columns of exp(logits) [T, E] in turn until their sums over all ranks are nearly even.

    That is when the columns' factors change by 1e-4 or less in the mean. Rows sum to 1 / T and columns to 1 / E, T the
    tokens of all ranks; SinkhornGate ranks by the result.
    gather(x, same_size=True): x of every rank.
    """
    num_experts = logits.shape[1]
    # A row may be scaled at will, since of_token undoes it: by its largest, so that exp() cannot overflow. A token of
    # NaN weighs nothing.
    cost = (logits - logits.amax(1, keepdim=True)).exp().nan_to_num(0.0)
    num_tokens = _sum_over_ranks(cost.new_ones(len(cost), 1), gather).clamp(min=1)
    of_expert = cost.new_ones(1, num_experts)
    for _ in range(_MAX_ROUNDS):
        before = of_expert
        of_token = 1 / (num_tokens * ((before * cost).sum(1, keepdim=True) + _EPSILON))  # [T, 1]
        of_expert = 1 / (num_experts * (_sum_over_ranks(of_token * cost, gather) + _EPSILON))
        if not (before - of_expert).abs().mean() > _TOLERANCE:
            break
    return of_expert * cost * of_token


def _sum_over_ranks(x: torch.Tensor, gather: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
    """Sum x [T, N] over the tokens of all ranks -> [1, N], with the same bits on every rank.

    Not by ranks.sum(): that would add other microbatches (accumulation.py), and number its sums for a repeated forward,
    which does not come here.
    """
    return torch.cat(gather(x.sum(0, keepdim=True), same_size=True)).sum(0, keepdim=True)


@custom_op("fmoe_ext::balanced_shares")
def balanced_shares_traced(logits: torch.Tensor) -> torch.Tensor:
    """Compute balanced_shares() of one rank, as one operator of a compiled graph."""
    return balanced_shares(logits, lambda x, same_size: [x])


@register_fake("fmoe_ext::balanced_shares", logits=2)
def _(logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(logits)


NO_GRADIENT = "a gate ranks by these shares, and weighs by its scores"
register_not_differentiable("fmoe_ext::balanced_shares", NO_GRADIENT)
