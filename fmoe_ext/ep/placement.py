"""Say where a layer's experts live: on which rank of its group, and on which node.

An expert has a number, which topk_idx names, and a place, in which rank r has places [r * e, (r + 1) * e). They are the
same until experts move (planning/placement.py): experts_in_place[place] is the expert there. Rows are sent in an order
of their own, the slots: sorted by chunk, then by place, so that a chunk is one piece of memory. With E = 4 experts
on 2 ranks, in 2 chunks:

    place    0  1  2  3        rank 0 has places 0 and 1
    chunk    0  1  0  1        the first expert of each rank travels first
    slot     0  2  1  3
"""

from __future__ import annotations

import functools
import socket
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fmoe_ext import _env
from fmoe_ext.ep.process_groups import (
    Group,
    find_group,
    gather_values,
    new_group_of,
    next_layer_index,
    register_group,
    timeout_of,
)
from fmoe_ext.ep.static import RowLimit


def constant(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return an int64 tensor of these values, the same one at every call; not to be changed."""
    # a compiled graph holds constants of its own; eager would copy to the device in each forward
    return (
        torch.tensor(values, device=device)
        if (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
        else _kept(values, device)
    )


@functools.lru_cache(maxsize=256)
def _kept(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, device=device)


def lookup(table: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Return table[topk_idx], and -1 for dropped choices."""
    return torch.where(topk_idx < 0, -1, table[topk_idx.clamp(min=0).long()])


class ExpertPlacement:
    """Placement of experts: rank r holds [r * e, (r + 1) * e) of E = group size * e, unless they have moved.

    ExpertParallel is one, and Nodes has two.

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
        # by rank, the ranks that hold shards of its experts, where fully_shard_experts() has cut them; else None
        self.sharing_ranks: list[list[int]] | None = None
        self.nodes: Nodes | None = None  # of exchange="node"
        self.wire = "full"  # of wire.WIRES
        self.layout = ""  # the ranks compare it before the first rows (ExpertParallel)
        self.row_limit: RowLimit | None = None
        if max_rows_per_rank is not None:
            ranks = dist.get_process_group_ranks(find_group(self.group))
            self.row_limit = RowLimit(max_rows_per_rank, self.layer_index, ranks)

    def tables(self, chunk_ends: Sequence[int]) -> Tables:
        """Number the experts for exchanges in chunks that end there."""
        return _tables(tuple(self.experts_in_place), self.num_local_experts, tuple(chunk_ends))

    def split_shadows(self, topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split topk_idx: choices that travel, and of shadowed experts their index in shadows; -1 elsewhere."""
        if not self.shadows:
            return topk_idx, None
        number = [-1] * self.num_experts
        for position, expert in enumerate(self.shadows):
            number[expert] = position
        shadow_idx = lookup(constant(tuple(number), topk_idx.device), topk_idx)
        return torch.where(shadow_idx < 0, topk_idx, -1), shadow_idx

    @property
    def places_of_shadows(self) -> tuple[int, ...]:
        """List the places of the shadowed experts."""
        return tuple(self.experts_in_place.index(expert) for expert in self.shadows)


class Tables(NamedTuple):
    """Numbers of a layer's experts on their way. W ranks, C chunks of the experts of each.

    A chunk's rows lie together, and in it the rows for one rank, so that they travel without another copy. Counts go to
    their ranks in one message, so they are picked by rank, and by chunk within it. A way is a chunk of a rank.
    """

    slots: tuple[int, ...] | None  # [E]: position of each expert in the order of sending; None: its number
    slots_by_rank: tuple[int, ...] | None  # [E]: slot of each place, in the order of places; None: in order
    ways: tuple[int, ...]  # [E]: chunk * W + rank of each expert
    ways_by_rank: tuple[int, ...] | None  # [W * C]: ways, sorted by rank; None: in order
    local_numbers: tuple[int, ...]  # [E]: each expert's index within its rank


@functools.lru_cache(maxsize=256)  # the same in each forward, until experts move
def _tables(experts_in_place: tuple[int, ...], num_local: int, chunk_ends: tuple[int, ...]) -> Tables:
    num_experts, num_chunks = len(experts_in_place), len(chunk_ends)
    num_ranks = num_experts // num_local
    # [e]: the chunk of each expert of a rank, alike on all ranks
    chunk_of = [sum(end <= local for end in chunk_ends) for local in range(num_local)]
    # places in the order of sending: by chunk, in it by rank
    order = sorted(range(num_experts), key=lambda place: (chunk_of[place % num_local], place))
    slots, ways, local_numbers = [0] * num_experts, [0] * num_experts, [0] * num_experts
    for slot, place in enumerate(order):
        slots[experts_in_place[place]] = slot
    for place, expert in enumerate(experts_in_place):
        rank, local_numbers[expert] = divmod(place, num_local)
        ways[expert] = chunk_of[place % num_local] * num_ranks + rank
    # None for what is in order: the forward then looks nothing up
    is_sorted, is_one_chunk = slots == list(range(num_experts)), num_chunks == 1
    ways_by_rank = tuple(c * num_ranks + r for r in range(num_ranks) for c in range(num_chunks))
    return Tables(
        None if is_sorted else tuple(slots),
        None if is_one_chunk else tuple(slots[expert] for expert in experts_in_place),
        tuple(ways),
        None if is_one_chunk else ways_by_rank,
        tuple(local_numbers),
    )


class Nodes:
    """Placement of an ExpertParallel's experts on nodes: a node holds the experts of its ranks.

    across: a placement on the group of one rank of each node, those with this rank's place on their node; each of them
    stands for all experts of its node. inside: a placement on the ranks of this node. Plain data, as ExpertPlacement.
    """

    def __init__(self, group_name: str, num_local_experts: int):
        groups = _groups(find_group(group_name))
        # places of the whole group, node by node: the places of `across`
        self._places = [
            rank * num_local_experts + local
            for node in groups.nodes
            for rank in node
            for local in range(num_local_experts)
        ]
        self.across = ExpertPlacement(groups.across, len(groups.nodes[0]) * num_local_experts)
        self.inside = ExpertPlacement(groups.inside, num_local_experts)

    def place(self, experts_in_place: Sequence[int]) -> None:
        """Take over the expert of each place on the ranks of the whole group."""
        self.across.experts_in_place = [experts_in_place[place] for place in self._places]


@dataclass(frozen=True)
class _Groups:
    """Process groups of this rank."""

    across: dist.ProcessGroup  # one rank of each node
    inside: dist.ProcessGroup  # the ranks of this node
    nodes: list[list[int]]  # the ranks of each node


# {group: the process groups of its nodes}, until destroy_process_group() or the end of the job
_of_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, _Groups] = weakref.WeakKeyDictionary()


def find_nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """Find the ranks of each node, counted in the group, in the order of their first; a collective call.

    A node is the ranks with one host name, or FMOE_RANKS_PER_NODE neighbours.
    """
    nodes: dict[object, list[int]] = {}
    mine = (_env.get("FMOE_RANKS_PER_NODE"), socket.gethostname())
    for rank, (ranks_per_node, host) in enumerate(gather_values(mine, group)):
        nodes.setdefault(rank // ranks_per_node if ranks_per_node else host, []).append(rank)
    return list(nodes.values())


def _groups(group: dist.ProcessGroup) -> _Groups:
    """Make the groups of a group's nodes at the first call, which is collective."""
    if group not in _of_nodes:
        nodes = find_nodes(group)
        sizes = [len(node) for node in nodes]
        if len(set(sizes)) > 1:
            raise ValueError(
                f'exchange="node" needs as many ranks of the group on every node, but they have {sizes}: use '
                'exchange="token"'
            )
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        mine = next(node for node in nodes if rank in node)
        # new_group() sorts its ranks, so the nodes must be in the order of their ranks in `across`
        nodes.sort(key=lambda node: node[mine.index(rank)])

        def make(members: list[int]) -> dist.ProcessGroup:
            made = new_group_of(
                [ranks[member] for member in members],
                group,
                timeout=timeout_of(group),
                backend=str(dist.get_backend_config(group)),
            )
            assert made is not None  # this rank is a member of both
            register_group(made, timeout_of(group))
            return made

        across = make([node[mine.index(rank)] for node in nodes])
        _of_nodes[group] = _Groups(across, make(mine), nodes)
    return _of_nodes[group]
