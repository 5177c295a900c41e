"""Where the experts of a layer live on the ranks of a group, and the way in for its tokens."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fmoe_ext.ep.constants import constant, lookup
from fmoe_ext.ep.exchange import Group, check_same, find_group, next_layer_index, register_group
from fmoe_ext.ep.header import make_header
from fmoe_ext.ep.load import LoadCounter
from fmoe_ext.ep.plan import ExactPlan, Plan, StaticPlan
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.ep.tuning import OverlapTuner
from fmoe_ext.recompute import is_counted
from fmoe_ext.routing import DispatchHandle, Nest


class ExpertParallel:
    """Where the experts of one layer live, and how tokens get there.

    Rank r of the group holds the experts [r * e, (r + 1) * e) of E = group size * e, unless they are placed otherwise.
    overlap_degree: number of chunks, at most e; "auto" measures the first forwards and then chooses.
    max_rows_per_rank: static mode, every rank sends every other this many rows, padding included.
    Plain data, so that layers can be copied and pickled; the group is found by its name.
    """

    def __init__(
        self,
        group: Group,
        num_local_experts: int,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
    ):
        self.group = register_group(group)
        self.size = dist.get_world_size(find_group(self.group))
        self.rank = dist.get_rank(find_group(self.group))
        self.num_local_experts = num_local_experts
        self.num_experts = num_local_experts * self.size
        self.layer_index = next_layer_index(self.group)
        self.load = LoadCounter(self.num_experts)
        self.experts_in_place = list(range(self.num_experts))  # rank r holds the r-th part
        self.shadows: tuple[int, ...] = ()  # experts that are computed where their tokens are
        self.overlap_degree = overlap_degree
        self.chunk_ends, self.tuner = self._first_chunks(overlap_degree)
        self.row_limit: RowLimit | None = None
        if max_rows_per_rank is not None:
            if max_rows_per_rank < 1 or overlap_degree != 1:
                raise ValueError(
                    "max_rows_per_rank must be at least 1 and needs overlap_degree=1, but got "
                    f"max_rows_per_rank={max_rows_per_rank}, overlap_degree={overlap_degree!r}"
                )
            ranks = dist.get_process_group_ranks(find_group(self.group))
            self.row_limit = RowLimit(max_rows_per_rank, self.layer_index, ranks)
        self._is_checked = False

    def _first_chunks(self, overlap_degree: int | str) -> tuple[list[int], OverlapTuner | None]:
        """The ends of the chunks' experts, and what may choose others."""
        if overlap_degree == "auto":
            return [self.num_local_experts], OverlapTuner(self.group, self.layer_index)
        if isinstance(overlap_degree, str) or overlap_degree < 1:
            raise ValueError(f'overlap_degree must be at least 1, or "auto", but got {overlap_degree!r}')
        return _even_ends(self.num_local_experts, min(overlap_degree, self.num_local_experts)), None

    @torch.compiler.disable
    def choose_overlap(self, max_chunks: int) -> list[int]:
        """The ends of the chunks' experts in the next forward; all ranks call it before one.

        Ends the measurements of overlap_degree="auto" once there are enough.
        """
        if self.tuner is not None and self.tuner.is_due:
            num_chunks = self.tuner.choose(min(max_chunks, self.num_local_experts))
            self.chunk_ends, self.tuner = _even_ends(self.num_local_experts, num_chunks), None
        return self.chunk_ends

    @torch.compiler.disable
    def dispatch(self, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Exchange:
        """Starts the way of tokens to their experts: fmoe_ext.dispatch.dispatch(), which see."""
        self._check_once()
        if is_counted():
            self.load.count(topk_idx)
        begin = Exchange if self.tuner is None else self.tuner.begin_exchange
        exchange = begin(self, x, topk_idx, topk_weights)
        exchange.plan()
        exchange.send()
        return exchange

    def pop_load(self, everywhere: bool = False) -> list[int]:
        """Choices of each expert by all ranks of the group (or of the job) since the last call; collective."""
        group = dist.group.WORLD if everywhere else find_group(self.group)
        assert group is not None
        return self.load.pop(group)

    def plan(self, handle: DispatchHandle, leaves: Sequence[torch.Tensor]) -> Plan:
        """Tells the other ranks how many rows come. handle: of choices by slots_of(); leaves: the tensors of tokens."""
        device = handle.tokens_per_expert.device
        slots = self._slots()
        place_to_slot = constant(tuple(slots[expert] for expert in self.experts_in_place), device)
        counts = handle.tokens_per_expert[place_to_slot].view(self.size, self.num_local_experts)
        header = make_header(self.layer_index, leaves, device)
        if self.row_limit is None:
            return ExactPlan(handle, counts, header, self.group, self.chunk_ends)
        return StaticPlan(handle, counts, header, self.group, self.row_limit)

    def slots_of(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """topk_idx with experts numbered in the order of sending."""
        return lookup(constant(self._slots(), topk_idx.device), topk_idx)

    def _slots(self) -> tuple[int, ...]:
        """The number of each expert in the order of sending: by chunk, then by rank, then by place."""
        first, order = 0, []
        for end in self.chunk_ends:
            for rank in range(self.size):
                begin = rank * self.num_local_experts
                order += self.experts_in_place[begin + first : begin + end]
            first = end
        slots = [0] * self.num_experts
        for slot, expert in enumerate(order):
            slots[expert] = slot
        return tuple(slots)

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

    def _check_once(self) -> None:
        """Before the first rows: ranks that were given different layers find out here."""
        if self._is_checked:
            return
        check_same(
            "(layer, num_experts, experts of a rank, overlap_degree, max_rows_per_rank)",
            (
                *(self.layer_index, self.num_experts, self.num_local_experts, self.overlap_degree),
                self.row_limit and self.row_limit.max_rows,
            ),
            find_group(self.group),
        )
        self._is_checked = True


def _even_ends(total: int, parts: int) -> list[int]:
    """Ends of `parts` ranges that cover [0, total), as equal as can be."""
    return [total * (part + 1) // parts for part in range(parts)]
