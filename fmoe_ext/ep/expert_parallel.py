"""Where the experts of a layer live on the ranks of a group, and the way in for its tokens."""

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from fmoe_ext.ep.constants import constant, lookup
from fmoe_ext.ep.exchange import NO_GRAPH, Group, check_same, find_group, next_layer_index, register_group
from fmoe_ext.ep.header import make_header
from fmoe_ext.ep.load import LoadCounter
from fmoe_ext.ep.plan import ExactPlan, Plan, StaticPlan
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ep.static import RowLimit
from fmoe_ext.ep.token_exchange import TokenExchange
from fmoe_ext.ep.tuning import Tuner, timed
from fmoe_ext.ops.outside_graphs import outside_graphs
from fmoe_ext.recompute import current_forward, is_counted
from fmoe_ext.routing import DispatchHandle, Nest

EXCHANGES: Mapping[str, type[Exchange]] = MappingProxyType({"choice": Exchange, "token": TokenExchange})


@dataclass(frozen=True)
class Way:
    """How the tokens of a forward travel: what has a row, a name of EXCHANGES, and where the experts' chunks end."""

    exchange: str
    chunk_ends: list[int]


def check_way(overlap_degree: int | str, exchange: str) -> None:
    """ValueError for what no layer takes, on one rank or many."""
    if overlap_degree != "auto" and (isinstance(overlap_degree, str) or overlap_degree < 1):
        raise ValueError(f'overlap_degree must be at least 1, or "auto", but got {overlap_degree!r}')
    if exchange not in (*EXCHANGES, "auto"):
        known = ", ".join(f'"{name}"' for name in EXCHANGES)
        raise ValueError(f'exchange must be {known} or "auto", but got {exchange!r}')


class ExpertParallel:
    """Where the experts of one layer live, and how tokens get there.

    Rank r of the group holds the experts [r * e, (r + 1) * e) of E = group size * e, unless they are placed otherwise.
    overlap_degree: number of chunks, at most e; "auto" measures the first forwards and then chooses.
    exchange: what has a row that travels, a "choice" or a "token"; "auto" measures both.
    max_rows_per_rank: static mode, every rank sends every other this many rows, padding included.
    Plain data, so that layers can be copied and pickled; the group is found by its name.
    """

    def __init__(
        self,
        group: Group,
        num_local_experts: int,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
    ):
        check_way(overlap_degree, exchange)
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
        self.exchange = exchange
        self._way = Way(self._first_exchange(), self._first_chunks())
        self.tuner: Tuner | None = None  # what may choose another way
        if "auto" in (overlap_degree, exchange):
            exchanges = [*EXCHANGES] if exchange == "auto" else [exchange]
            self.tuner = Tuner(self.group, self.layer_index, exchanges, overlap_degree == "auto")
        self.row_limit: RowLimit | None = None
        if max_rows_per_rank is not None:
            if max_rows_per_rank < 1 or overlap_degree != 1:
                raise ValueError(
                    "max_rows_per_rank must be at least 1 and needs overlap_degree=1, but got "
                    f"max_rows_per_rank={max_rows_per_rank}, overlap_degree={overlap_degree!r}"
                )
            ranks = dist.get_process_group_ranks(find_group(self.group))
            self.row_limit = RowLimit(max_rows_per_rank, self.layer_index, ranks)
        # where fully_shard_experts() has cut the experts again: the ranks that share those of each rank of the group
        self.sharing_ranks: list[list[int]] | None = None
        self._is_checked = False

    def _first_chunks(self) -> list[int]:
        degree = self.overlap_degree
        if degree == "auto":
            return [self.num_local_experts]
        assert isinstance(degree, int)
        return _even_ends(self.num_local_experts, min(degree, self.num_local_experts))

    def _first_exchange(self) -> str:
        return "choice" if self.exchange == "auto" else self.exchange

    @property
    def chunk_ends(self) -> list[int]:
        """Where the chunks of a rank's experts end in the next forward."""
        return self._way.chunk_ends

    @outside_graphs(NO_GRAPH)
    def choose_way(self, max_chunks: int) -> Way:
        """How the tokens of this forward will travel; all ranks call it before they do.

        Ends the measurements of "auto" once there are enough. A repeated forward goes the way of the first.
        """
        if self.tuner is not None:
            exchange, num_chunks = self.tuner.choose(min(max_chunks, self.num_local_experts))
            ends = self.chunk_ends if num_chunks is None else _even_ends(self.num_local_experts, num_chunks)
            self._way = Way(exchange, ends)
            self.tuner = None if self.tuner.is_done else self.tuner
        return self._way_of_forward()

    def _way_of_forward(self) -> Way:
        forward = current_forward()
        if forward is None:
            return self._way
        if forward.way is None:
            forward.way = self._way
        return forward.way

    @outside_graphs(NO_GRAPH)
    def dispatch(self, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Exchange:
        """Starts the way of tokens to their experts: fmoe_ext.dispatch.dispatch(), which see."""
        self._check_once()
        if is_counted():
            self.load.count(topk_idx)
        way = self._way_of_forward()
        kind, arguments = EXCHANGES[way.exchange], (self, way.chunk_ends, x, topk_idx, topk_weights)
        exchange: Exchange
        if self.tuner is not None:
            exchange = timed(kind)(self.tuner.watches[way.exchange], *arguments)
        else:
            exchange = kind(*arguments)
        exchange.plan()
        exchange.send()
        return exchange

    def pop_load(self, everywhere: bool = False) -> list[int]:
        """Choices of each expert by all ranks of the group (or of the job) since the last call; collective."""
        group = dist.group.WORLD if everywhere else find_group(self.group)
        assert group is not None
        return self.load.pop(group)

    def plan(
        self,
        handle: DispatchHandle,
        counts: torch.Tensor,
        ends: Sequence[int],
        leaves: Sequence[torch.Tensor],
    ) -> Plan:
        """Tells the other ranks how many rows come. handle: of rows in the order of sending; leaves: tensors of tokens.

        counts [ranks, n]: how many for each rank, of n kinds; ends: where chunks end among them.
        """
        header = make_header(self.layer_index, leaves, counts.device)
        if self.row_limit is None:
            return ExactPlan(handle, counts, header, self.group, ends)
        return StaticPlan(handle, counts, header, self.group, self.row_limit)

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
        """Where each expert's tokens go: a number for every chunk and rank, by chunk, then by rank."""
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

    def _check_once(self) -> None:
        """Before the first rows: ranks that were given different layers find out here."""
        if self._is_checked:
            return
        check_same(
            "(layer, num_experts, experts of a rank, overlap_degree, max_rows_per_rank, exchange)",
            (
                *(self.layer_index, self.num_experts, self.num_local_experts, self.overlap_degree),
                self.row_limit and self.row_limit.max_rows,
                self.exchange,
            ),
            find_group(self.group),
        )
        self._is_checked = True


def _even_ends(total: int, parts: int) -> list[int]:
    """Ends of `parts` ranges that cover [0, total), as equal as can be."""
    return [total * (part + 1) // parts for part in range(parts)]
