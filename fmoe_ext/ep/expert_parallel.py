"""Expert parallelism of one layer: what the user asks for (ParallelLayout) and what carries it out (ExpertParallel).

FMoE makes an ExpertParallel for a layer over ranks, and dispatch.py sends tokens through it. It knows which rank holds
which expert (placement.py), chooses how the tokens of a forward travel (a class of EXCHANGES, in chunks) and starts the
exchange. With "auto" it measures first (tuning.py). move_rows() moves experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext.ep.exchange import global_exchange
from fmoe_ext.ep.placement import ExpertPlacement, Nodes, find_nodes
from fmoe_ext.ep.process_groups import Group, check_agreement, find_group, host_device, size_of
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.ep.token_exchange import NodeExchange, TokenExchange
from fmoe_ext.ep.tuning import Tuner
from fmoe_ext.ep.wire import WIRES
from fmoe_ext.step import Step, is_counted
from fmoe_ext.tokens import Batch, Nest


class LoadCounter:
    """Counts how often this rank's tokens chose each expert since the last pop()."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu")

    def add(self, counts: torch.Tensor) -> None:
        """Add the choices of a forward, [num_experts]."""
        if self._counts.device != counts.device:
            # forwards that train will write to it, which an inference tensor refuses
            with torch.inference_mode(False):
                self._counts = torch.zeros(self.num_experts, dtype=torch.int64, device=counts.device)
        self._counts.add_(counts)  # in place: a CUDA graph repeats it

    def pop(self, group: dist.ProcessGroup) -> list[int]:
        """Sum the counts over the ranks of a group and start anew; a collective call."""
        total = self._counts.clone()
        self._counts.zero_()
        # a layer on the CPU may be in an NCCL group, which reduces on GPUs only
        total = total.to(host_device(group))
        dist.all_reduce(total, group=group)
        return total.tolist()


EXCHANGES: Mapping[str, type[Exchange]] = MappingProxyType(
    {"choice": Exchange, "token": TokenExchange, "node": NodeExchange}
)


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Layout of one layer over ranks: FMoE(..., parallel=ParallelLayout(...)).

    world_size, moe_group: the experts of all world_size ranks of moe_group (a ProcessGroup, a DeviceMesh, or None
      for the default group) form one layer of num_expert * world_size experts, expert i on rank i // num_expert.
      All ranks of the group call forward, with any number of tokens each. world_size None: the size of moe_group, 1
      without one.
    gate_group: the ranks whose tokens count for the gate's losses and capacities, moe_group if None.
    slice_group: ranks with the same input; each computes a part of the rows.
    overlap_degree > 1 exchanges the rows of some experts while others compute; "auto" chooses it from the times of
      the first forwards.
    exchange: "choice" sends a token to the rank of each expert that it chose, "token" once to a rank that has
      several of them, where their results are summed: fewer bytes (DeepEP's deduplicated dispatch), equal but for
      rounding. "node" sends it once to a node, and from there to its ranks; the ranks of a node have one host name, or
      are FMOE_RANKS_PER_NODE neighbours. "auto" chooses it from the times of the first forwards.
    max_rows_per_rank: each rank sends every other this many rows, padding included, so that nothing waits for
      sizes and a CUDA graph can hold the layer; tokens * top_k, or tokens with exchange="token", is always enough.
      If a rank has more, every rank gets a RuntimeError: on the CPU at once; on CUDA results are NaN and
      ep.static.check_max_rows(model) raises.
    wire: "full" sends rows as they are. "fp8" and "mxfp8" send rows of float32, bfloat16 or float16, and their
      gradients, in E4M3: half the bytes of bfloat16, with 3 bits of mantissa, and a scale for each row ("fp8") or for
      each 32 columns ("mxfp8"). Rows of fewer than 32 columns, and for "mxfp8" of no multiple of 32, go as they are.
      Not with exchange="node" or "auto", nor with torch.compile.

    Example:

        >>> layout = ParallelLayout(exchange="token", overlap_degree="auto")
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, parallel=layout)
        >>> mlp(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    world_size: int | None = None
    moe_group: Group = None
    gate_group: Group = None
    slice_group: Group = None
    overlap_degree: int | str = 1
    max_rows_per_rank: int | None = None
    exchange: str = "choice"
    wire: str = "full"

    @staticmethod
    def of(parallel: "ParallelLayout | None", **keywords: Any) -> "ParallelLayout":
        """Return parallel, or the layout that FMoE's own keywords (world_size=, ...) give; ValueError for both."""
        if parallel is None:
            return ParallelLayout(**keywords)
        defaults = {
            "world_size": 1,
            **{f.name: f.default for f in fields(parallel) if f.name != "world_size"},
        }
        both = [name for name, value in keywords.items() if value != defaults[name]]
        if both:
            raise ValueError(f"parallel= says how the layer is spread: give {both[0]}= to ParallelLayout")
        return parallel

    @property
    def is_spread(self) -> bool:
        """True if a group shares the experts, even a group of one rank."""
        return self.moe_group is not None or (self.world_size or 1) > 1

    @property
    def num_ranks(self) -> int:
        """Ranks that share the experts."""
        if self.world_size is not None:
            return self.world_size
        return 1 if self.moe_group is None else size_of(self.moe_group)


LAYOUT_KEYWORDS = tuple(f.name for f in fields(ParallelLayout))


@dataclass(frozen=True)
class _Route:
    """Route of a forward's tokens."""

    exchange: str  # a name of EXCHANGES, or of carry_by()
    make: Callable[
        ..., Exchange
    ]  # its class, or what carry_by() was given: a compiled graph cannot look it up
    chunk_ends: list[int]  # where the chunks of a rank's experts end


def check_route(overlap_degree: int | str, exchange: str, wire: str = "full") -> None:
    """Raise ValueError for values of these options that no layer takes, whether on one rank or many."""
    if overlap_degree != "auto" and (isinstance(overlap_degree, str) or overlap_degree < 1):
        raise ValueError(f'overlap_degree must be at least 1, or "auto", but got {overlap_degree!r}')
    if exchange not in (*EXCHANGES, "auto"):
        known = ", ".join(f'"{name}"' for name in EXCHANGES)
        raise ValueError(f'exchange must be {known} or "auto", but got {exchange!r}')
    if wire not in WIRES:
        raise ValueError(f"wire must be one of {', '.join(WIRES)}, but got {wire!r}")
    if wire != "full" and exchange in ("node", "auto"):
        raise ValueError(f'wire="{wire}" is for exchange="choice" and "token", but got exchange={exchange!r}')


class ExpertParallel(ExpertPlacement):
    """Placement of one layer's experts, and the routes of tokens to them.

    Letters of shapes: T tokens, K choices of a token, E experts in all, e experts of this rank, D width.

    overlap_degree: number of chunks, at most e; "auto" measures the first forwards and then chooses.
    exchange: a name of EXCHANGES, or "auto"; max_rows_per_rank and wire: as in ParallelLayout.
    """

    def __init__(
        self,
        group: Group,
        num_local_experts: int,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
        wire: str = "full",
    ):
        check_route(overlap_degree, exchange, wire)
        if max_rows_per_rank is not None and (max_rows_per_rank < 1 or overlap_degree != 1):
            raise ValueError(
                "max_rows_per_rank must be at least 1 and needs overlap_degree=1, but got "
                f"max_rows_per_rank={max_rows_per_rank}, overlap_degree={overlap_degree!r}"
            )
        if max_rows_per_rank is not None and exchange == "node":
            raise ValueError(
                'max_rows_per_rank is a number of rows for a rank, and exchange="node" sends them to nodes: use '
                'exchange="token" or "choice" with it'
            )
        super().__init__(group, num_local_experts, max_rows_per_rank)
        self.wire = wire
        self.load = LoadCounter(self.num_experts)
        self.overlap_degree = overlap_degree
        self.exchange = exchange
        # "auto" begins with one chunk: exchange and experts must not overlap while each is timed
        num_chunks = 1 if isinstance(overlap_degree, str) else min(overlap_degree, num_local_experts)
        first = "choice" if exchange == "auto" else exchange
        self._route = _Route(first, EXCHANGES[first], _even_ends(num_local_experts, num_chunks))
        if exchange == "node":
            self.nodes = Nodes(self.group, num_local_experts)
        self.tuner: Tuner | None = None  # measures for "auto"; None once it has chosen
        if "auto" in (overlap_degree, exchange):
            exchanges = [exchange]
            if exchange == "auto":
                exchanges = [name for name in EXCHANGES if name != "node"]
                if self.row_limit is None:
                    # "node" saves bytes only between several nodes, and needs equally many ranks in each, more than one
                    node_sizes = [len(node) for node in find_nodes(find_group(self.group))]
                    if len(node_sizes) > 1 and min(node_sizes) == max(node_sizes) > 1:
                        self.nodes = Nodes(self.group, num_local_experts)
                        exchanges.append("node")
            self.tuner = Tuner(self.group, self.layer_index, exchanges, overlap_degree == "auto")
        self._is_checked = False
        # What the ranks compare before the first rows.
        limit = self.row_limit and self.row_limit.max_rows
        sizes = self.layer_index, self.num_experts, self.num_local_experts
        self.layout = str((*sizes, overlap_degree, limit, exchange, wire))

    @property
    def depends_on_batch(self) -> str | None:
        """Say why a token's result depends on the other tokens, and what to do; None where it does not."""
        if self.exchange != "choice":
            return (
                f"exchange={self.exchange!r} adds up a token's results on each rank before it sends them, so that the "
                "order of the sum, and with it the last bits, depends on where experts are; use "
                'exchange="choice"'
            )
        if self.shadows:
            return (
                "results of shadowed experts are summed apart, and which experts are shadowed depends on the load; "
                "clear layer.expert_parallel.shadows"
            )
        return None

    @property
    def chosen_exchange(self) -> str:
        """The exchange of the next forward, a name of EXCHANGES."""
        return self._route.exchange

    @property
    def chunk_ends(self) -> list[int]:
        """Ends of the chunks of a rank's experts in the next forward."""
        return self._route.chunk_ends

    def carry_by(self, name: str, make: Callable[..., Exchange]) -> None:
        """Let an exchange of another library, under a name of its own, carry the tokens in one chunk."""
        self.exchange = name
        self._route = _Route(name, make, [self.num_local_experts])
        self.layout = f"{self.layout} by {name}"  # which the ranks compare before the first rows

    def choose_route(self, max_chunks: int, step: Step | None = None) -> _Route:
        """Choose the route of this forward's tokens; all ranks call it before they send.

        "auto" ends here once it has measured enough. A repeated forward takes the route of the original. A compiled
        graph measures nothing, and has one chunk.
        """
        if step is not None and step.is_traced:
            return self._route_of(step)
        if self.tuner is not None:
            exchange, num_chunks = self.tuner.choose(min(max_chunks, self.num_local_experts))
            ends = self.chunk_ends if num_chunks is None else _even_ends(self.num_local_experts, num_chunks)
            self._route = _Route(exchange, EXCHANGES[exchange], ends)
            self.tuner = None if self.tuner.is_done else self.tuner
        return self._route_of(step)

    def _route_of(self, step: Step | None) -> _Route:
        if step is not None and step.is_traced:
            return _Route(self._route.exchange, self._route.make, [self.num_local_experts])
        forward = None if step is None else step.forward
        if forward is None:
            return self._route
        # Activation checkpointing repeats a forward by its first route, even if "auto" has chosen another since.
        if forward.way is None:
            forward.way = self._route
        return forward.way

    def dispatch(
        self, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor, step: Step | None = None
    ) -> Exchange:
        """Start sending tokens to their experts; see fmoe_ext.dispatch.dispatch()."""
        if step is None:
            step = Step(
                Batch(),
                None,
                False,
                is_counted(),
                (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()),
            )
        # Before the first rows: ranks whose layers differ would wait for each other. A compiled graph checks by itself.
        if not step.is_traced and not self._is_checked:
            check_agreement(self.layout, self.group)
            self._is_checked = True
        route = self._route_of(step)
        exchange: Exchange = route.make(self, route.chunk_ends, x, topk_idx, topk_weights, step)
        if self.tuner is not None and not step.is_traced:
            exchange.watch = self.tuner.watches[route.exchange]
            exchange.watch.begin(topk_idx.device)
        exchange.plan()
        if step.is_counted:
            self.load.add(step.count(topk_idx, self.num_experts))
        exchange.send()
        return exchange

    def pop_load(self, everywhere: bool = False) -> list[int]:
        """Return each expert's load since the last call, over the group's ranks, or all if everywhere; collective."""
        group = dist.group.WORLD if everywhere else find_group(self.group)
        assert group is not None
        return self.load.pop(group)


def _even_ends(total: int, parts: int) -> list[int]:
    """Return the ends of `parts` ranges that cover [0, total), as equal as can be."""
    return [total * (part + 1) // parts for part in range(parts)]


def move_rows(x: torch.Tensor, old: Sequence[int], new: Sequence[int], parallel: ExpertParallel) -> None:
    """Move rows of x [e, *], one per expert, in place from the order `old` of all experts to `new`; collective."""
    num_local, rank = parallel.num_local_experts, parallel.rank
    place_before = {expert: place for place, expert in enumerate(old)}
    # by rank: which of my rows go there, in the order that it expects; at which of my places its rows arrive
    sends: list[list[int]] = [[] for _ in range(parallel.size)]
    arrivals: list[list[int]] = [[] for _ in range(parallel.size)]
    for place, expert in enumerate(new):
        target, index = divmod(place, num_local)
        source, source_index = divmod(place_before[expert], num_local)
        if source == rank:
            sends[target].append(source_index)
        if target == rank:
            arrivals[source].append(index)
    # each rank gets what it lacks from each other in one exchange, and what stays from itself
    rows = x[[index for part in sends for index in part]]
    received = global_exchange(
        rows, [len(part) for part in sends], [len(part) for part in arrivals], parallel.group
    )
    x[[index for part in arrivals for index in part]] = received
