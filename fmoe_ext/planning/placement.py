"""Place experts anew: they move between ranks, with their optimizer's state, to even out the load while a run trains.

A training loop calls rebalance() between steps. Where it pays, plan() finds an order of the experts for the load since
the last call, and move_experts() brings weights, gradients and the optimizer's rows there by one exchange each. Results
do not change, as the layer sends tokens to wherever an expert lives; only the busiest rank, which all others wait for,
has less to do.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fmoe_ext._sharded import is_zero_redundancy
from fmoe_ext.ep import expert_parallel_layers
from fmoe_ext.ep.expert_parallel import move_rows

logger = logging.getLogger(__name__)


def plan(load: Sequence[int], num_ranks: int, current: Sequence[int] | None = None) -> list[int]:
    """Order the experts by their places (rank r has the r-th part), so that the ranks' loads are nearly even.

    load: rows of each expert; current: the order now. Greedy: the most loaded expert goes to the least loaded rank that
    has room (LPT, at most 4/3 of the best). An expert stays where `current` has it if its rank is as good, and all stay
    if nothing is gained.

    Example:

        >>> plan([9, 7, 1, 1], num_ranks=2)  # rank 0 gets 9 + 1 rows, rank 1 gets 1 + 7
        [0, 3, 2, 1]
    """
    num_local = len(load) // num_ranks
    current = list(current) if current is not None else list(range(len(load)))
    home = {expert: place // num_local for place, expert in enumerate(current)}
    # 1. The rank of each expert, the most loaded first.
    total = [0] * num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        free = [r for r in range(num_ranks) if len(held[r]) < num_local]
        rank = min(free, key=lambda r: (total[r], r != home[expert], r))
        held[rank].append(expert)
        total[rank] += load[expert]
    # 2. Its place there: an expert that stays on its rank keeps its place, the others fill the free places in order.
    new: list[int] = []
    for rank, experts in enumerate(held):
        before = current[rank * num_local : (rank + 1) * num_local]
        arrived = iter([expert for expert in experts if home[expert] != rank])
        new += [expert if expert in experts else next(arrived) for expert in before]
    return new if imbalance(load, num_ranks, new) < imbalance(load, num_ranks, current) else current


def imbalance(load: Sequence[int], num_ranks: int, order: Sequence[int]) -> float:
    """Return the largest load of a rank over the mean."""
    num_local = len(load) // num_ranks
    sums = [sum(load[e] for e in order[r * num_local : (r + 1) * num_local]) for r in range(num_ranks)]
    return max(sums) * num_ranks / max(sum(sums), 1)


def rebalance(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, threshold: float = 1.1
) -> int:
    """Move the experts of every expert-parallel layer by the load since the last call -> how many moved.

    A layer whose busiest rank has less than threshold times the mean is left alone. All ranks call it between
    steps, with gradients cleared or not: parameters, gradients and the optimizer's tensors with a row for each expert
    move alike, so that training goes on as if nothing had happened. The state dict has the order, "expert_placement".
    Layers without FusedExperts are left alone; experts of replicas (expert parallelism inside data parallelism) move
    alike. Raises ValueError, before it moves any expert of a layer, for ZeroRedundancyOptimizer, and for state of an
    optimizer that several experts share.
    """
    moved = 0
    for name, layer in expert_parallel_layers(module):
        parallel = layer.expert_parallel
        if not hasattr(getattr(layer, "experts", None), "weights"):  # no FusedExperts, so no rows to move
            continue
        # of all ranks of the job: replicas of a layer must move alike, whatever their own tokens chose
        load = parallel.pop_load(everywhere=True)
        before = imbalance(load, parallel.size, parallel.experts_in_place)
        if before < threshold:
            continue
        order = plan(load, parallel.size, parallel.experts_in_place)
        if order == parallel.experts_in_place:
            continue
        after = imbalance(load, parallel.size, order)
        changed = move_experts(layer, order, optimizer)
        logger.info(
            "%s: moved %d experts, busiest rank %.2f -> %.2f of the mean", name, changed, before, after
        )
        moved += changed
    return moved


@torch.no_grad()
def move_experts(layer: Any, order: Sequence[int], optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bring the experts of a layer to new places: order[place] is the expert that will live there. Collective."""
    parallel = layer.expert_parallel
    if optimizer is not None and is_zero_redundancy(optimizer):
        raise ValueError(
            "the state of ZeroRedundancyOptimizer is spread over the ranks and cannot move with experts: give "
            "experts an optimizer of their own"
        )
    if sorted(order) != list(range(parallel.num_experts)):
        raise ValueError(f"order must name each of the {parallel.num_experts} experts once, but got {order}")
    old = parallel.experts_in_place
    # every tensor with a row for each expert, in one order on all ranks, as each is an exchange
    with_rows = [
        x
        for name, param in layer.experts.named_parameters()
        for x in (param.data, param.grad, *_rows_of_state(name, param, optimizer))
        if x is not None
    ]
    for x in with_rows:
        move_rows(x, old, order, parallel)
    layer.place_experts(order)
    return sum(a != b for a, b in zip(old, order, strict=True))


def _rows_of_state(
    name: str, param: torch.Tensor, optimizer: torch.optim.Optimizer | None
) -> list[torch.Tensor]:
    """List the optimizer's tensors with a row for each expert of a parameter [e, *]; its numbers stay."""
    state = optimizer.state.get(param, {}) if optimizer is not None else {}
    tensors = {entry: x for entry, x in state.items() if isinstance(x, torch.Tensor) and x.dim()}
    for entry, x in tensors.items():
        if x.shape[0] != param.shape[0]:
            raise ValueError(
                f"the optimizer's state {entry!r} {list(x.shape)} of {name} {list(param.shape)} of the experts is one "
                "for several of them, which cannot move apart: use an optimizer with state like the parameter (Adam, "
                "SGD), or experts without bias"
            )
    return list(tensors.values())
