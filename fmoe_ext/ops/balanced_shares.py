"""balanced_shares: Sinkhorn's iteration on a gate's logits, over the tokens of all ranks."""

from collections.abc import Callable

import torch

from fmoe_ext.ops._autograd import custom_op, register_fake, register_not_differentiable

TOLERANCE = 1e-4
_EPSILON = 1e-8
_MAX_ROUNDS = 1000


def balanced_shares(logits: torch.Tensor, gather: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
    """Scale rows and columns of exp(logits) [T, E] in turn until those of all ranks have even sums, to about 1e-4.

    The scores that SinkhornGate ranks; rows sum to 1 / T and columns to 1 / E, T the tokens of all ranks.
    gather(x, same_size=True): x of every rank.
    """
    num_experts = logits.shape[1]
    # a factor of a row changes its own scale alone, so exp() cannot overflow; a token of NaN weighs nothing
    cost = (logits - logits.amax(1, keepdim=True)).exp().nan_to_num(0.0)
    num_tokens = _sum_over_ranks(cost.new_ones(len(cost), 1), gather).clamp(min=1)
    of_expert = cost.new_ones(1, num_experts)
    for _ in range(_MAX_ROUNDS):
        before = of_expert
        of_token = 1 / (num_tokens * ((before * cost).sum(1, keepdim=True) + _EPSILON))  # [T, 1]
        of_expert = 1 / (num_experts * (_sum_over_ranks(of_token * cost, gather) + _EPSILON))
        if not (before - of_expert).abs().mean() > TOLERANCE:
            break
    return of_expert * cost * of_token


def _sum_over_ranks(x: torch.Tensor, gather: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
    """Sum x [T, N] -> [1, N], with the same bits on every rank; of this microbatch alone.

    ranks.sum() would add other microbatches (accumulation.py), and number its sums for a repeated forward, which does
    not come here.
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
