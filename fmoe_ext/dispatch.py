"""Bring tokens to their experts and back, on one rank or many: dispatch() and combine(), each the other's backward.

FMoE.forward calls both, and a layer of your own may. On one rank nothing moves; over ranks ep/ sends the tokens.
"""

import torch

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.routing import Dispatched, ExpertInput
from fmoe_ext.step import Step
from fmoe_ext.tokens import Nest


def dispatch(
    x: Nest,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    expert_parallel: ExpertParallel | None = None,
    step: Step | None = None,
) -> Dispatched:
    """Send every token to the ranks of its experts.

    x [T, *] or a nest (list, tuple, dict) of such tensors, topk_idx [T, K] (-1 for dropped choices), topk_weights
    [T, K]. expert_parallel: where the num_experts experts live; None: all on this rank, and nothing moves. step: the
    forward of the layer, None outside of one. Use the result so, on one rank and on many:

        dispatched = dispatch(x, topk_idx, topk_weights, num_experts, expert_parallel)
        for chunk in dispatched.chunks:
            chunk.give_back(compute(chunk.receive()))  # of an ExpertInput: the weighted sum of each token's experts
        out = combine(dispatched)

    compute is permute_rows(), the experts and unpermute_rows() of fmoe_ext.routing, or anything as good. All ranks of
    expert_parallel call this, in one order of layers. Raises ValueError if num_experts is not that of expert_parallel.

    Example:

        >>> x, topk_idx = torch.ones(3, 2), torch.tensor([[0], [1], [0]])
        >>> dispatched = dispatch(x, topk_idx, topk_weights=torch.ones(3, 1), num_experts=2)
        >>> for chunk in dispatched.chunks:
        ...     tokens = chunk.receive()  # of 2 experts, which multiply by 1 and by 2
        ...     rows, handle = fmoe_ext.routing.permute_rows(tokens.x, tokens.topk_idx, 2)
        ...     rows[handle.offs[0] :] *= 2
        ...     chunk.give_back(fmoe_ext.routing.unpermute_rows(rows, handle, tokens.topk_weights))
        >>> fmoe_ext.dispatch.combine(dispatched).tolist()
        [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    """
    if expert_parallel is None:
        return _OnThisRank(ExpertInput(x, topk_idx, topk_weights, 0, num_experts))
    if expert_parallel.num_experts != num_experts:
        raise ValueError(
            f"num_experts={num_experts}, but expert_parallel has {expert_parallel.num_local_experts} experts "
            f"on each of {expert_parallel.size} ranks"
        )
    return expert_parallel.dispatch(x, topk_idx, topk_weights, step)


def combine(dispatched: Dispatched) -> Nest:
    """Bring the results of all chunks back to the ranks of their tokens -> [T, *] in the nest of the results."""
    return dispatched.combine()


class _OnThisRank:
    """Dispatched of one rank, and its only chunk: the tokens are here already."""

    def __init__(self, tokens: ExpertInput):
        self._tokens = tokens
        self._results: Nest = None

    @property
    def chunks(self) -> "list[_OnThisRank]":
        return [self]

    def receive(self) -> ExpertInput:
        return self._tokens

    def give_back(self, results: Nest) -> None:
        self._results = results

    def combine(self) -> Nest:
        return self._results
