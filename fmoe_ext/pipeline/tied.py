"""Parameters that several stages share, such as an embedding that is also the head."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.pipeline.stage import Stage


class TiedParameters:
    """The parameters that stages of different ranks share: one value, and the sum of the stages' gradients."""

    def __init__(self, stages: Sequence[Stage], places: list[list[int]], pp_group: dist.ProcessGroup):
        rank_of = {index: rank for rank, indexes in enumerate(places) for index in indexes}
        holders: dict[nn.Parameter, set[int]] = {}
        for stage in stages:
            for p in stage.parameters():  # in one order on all ranks, as groups are made in it
                holders.setdefault(p, set()).add(rank_of[stage.index])
        members = dist.get_process_group_ranks(pp_group)
        me = dist.get_rank(pp_group)
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._num_ranks: dict[nn.Parameter, int] = {}
        for p, ranks in holders.items():
            if len(ranks) > 1 and me in ranks:
                own = [members[rank] for rank in sorted(ranks)]
                self._shared.append((p, dist.new_group(own, use_local_synchronization=True)))
                self._num_ranks[p] = len(ranks)
        for p, group in self._shared:
            dist.broadcast(p.detach(), dist.get_process_group_ranks(group)[0], group=group)

    def __bool__(self) -> bool:
        return bool(self._shared)

    def num_ranks(self, param: nn.Parameter) -> int:
        """Ranks of one pipeline that have a copy."""
        return self._num_ranks.get(param, 1)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Makes the gradient of each copy the sum over the stages; without one a copy counts as zero."""
        for p, group in self._shared:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)
