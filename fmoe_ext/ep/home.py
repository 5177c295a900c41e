"""Placement of a layer's experts on the ranks of a group."""

from bisect import bisect
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fmoe_ext.ep.constants import constant, lookup
from fmoe_ext.ep.exchange import Group, find_group, next_layer_index, register_group
from fmoe_ext.ep.plan import ExactPlan, Plan, StaticPlan, make_header
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.routing import DispatchHandle
from fmoe_ext.step import Step


class Home:
    """Placement of experts: rank r holds [r * e, (r + 1) * e) of E = group size * e, unless they have moved.

    Plain data, so that layers can be copied and pickled; the group is found by its name.
    """

    def __init__(self, group: Group, num_local_experts: int, max_rows_per_rank: int | None = None):
        self.group = register_group(group)
        self.size = dist.get_world_size(find_group(self.group))
        self.rank = dist.get_rank(find_group(self.group))
        self.num_local_experts = num_local_experts
        self.num_experts = num_local_experts * self.size
        self.layer_index = next_layer_index(self.group)
        self.experts_in_place = list(range(self.num_experts))  # rank r holds the r-th part
        self.shadows: tuple[int, ...] = ()  # experts that are computed where their tokens are
        # where fully_shard_experts() has cut the experts again: the ranks that share those of each rank of the group
        self.sharing_ranks: list[list[int]] | None = None
        self.row_limit: RowLimit | None = None
        if max_rows_per_rank is not None:
            ranks = dist.get_process_group_ranks(find_group(self.group))
            self.row_limit = RowLimit(max_rows_per_rank, self.layer_index, ranks)

    def plan(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        ends: Sequence[int],
        leaves: Sequence[torch.Tensor],
        step: Step,
    ) -> Plan:
        """Exchanges with the other ranks how many rows come.

        handle: of rows in the order of sending. counts [ranks, n]: how many for each rank, of n kinds; ends: where
        chunks end among them. leaves: tensors of tokens. step: of the forward.
        """
        header = make_header(self.layer_index, leaves, counts.device)
        if self.row_limit is None:
            return ExactPlan(handle, counts, header, self.group, ends, step)
        return StaticPlan(handle, counts, header, self.group, self.row_limit, step)

    def slots(self, chunk_ends: Sequence[int]) -> tuple[int, ...]:
        """The number of each expert in the order of sending: by chunk, then by rank, then by place."""
        first, order = 0, []
        for end in chunk_ends:
            for rank in range(self.size):
                begin = rank * self.num_local_experts
                order += self.experts_in_place[begin + first : begin + end]
            first = end
        slots = [0] * self.num_experts
        for slot, expert in enumerate(order):
            slots[expert] = slot
        return tuple(slots)

    def ways(self, chunk_ends: Sequence[int]) -> tuple[int, ...]:
        """Destination of each expert's tokens: a number for every chunk and rank, by chunk, then by rank."""
        ways = [0] * self.num_experts
        for place, expert in enumerate(self.experts_in_place):
            rank, local = divmod(place, self.num_local_experts)
            ways[expert] = bisect(chunk_ends, local) * self.size + rank
        return tuple(ways)

    def split_shadows(self, topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Choices of experts to travel to, and choices of shadowed ones numbered as in shadows; -1 for the rest."""
        if not self.shadows:
            return topk_idx, None
        number = [-1] * self.num_experts
        for position, expert in enumerate(self.shadows):
            number[expert] = position
        shadow_idx = lookup(constant(tuple(number), topk_idx.device), topk_idx)
        return torch.where(shadow_idx < 0, topk_idx, -1), shadow_idx

    @property
    def places_of_shadows(self) -> tuple[int, ...]:
        """The places of the experts that every rank has a copy of."""
        return tuple(self.experts_in_place.index(expert) for expert in self.shadows)
