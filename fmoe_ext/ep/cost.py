"""Estimate the time of an expert-parallel layer: bytes to send and FLOP to compute, over what a rank's hardware can do.

A step lasts as long as its slowest rank:

    exchange    4 (latency + bytes / bandwidth): there and back, in the forward and in the backward
    compute     rows of its experts * FLOP of a row / throughput
    shadowing   weights of shadowed experts there, their gradients back; their tokens stay where they are

shadowing.py, and with it compat/_fastermoe.py, chooses by step_time(), which `fmoe simulate` reports; tuning.py chooses
by best_overlap(), of times that it measures. info.py and planning's layouts.py and cli.py take Hardware alone.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fmoe_ext import _env, ops
from fmoe_ext.ep.placement import find_nodes
from fmoe_ext.ep.process_groups import backend_of


@dataclass(frozen=True)
class Layer:
    """The sizes of one layer."""

    d_model: int
    d_hidden: int
    num_matrices: int = 2  # of an expert; 3 if it is gated
    bytes_per_element: int = 4
    top_k: int = 1
    exchange: str = "choice"  # as in FMoE, but never "auto"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.d_model * self.bytes_per_element

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return self.num_matrices * self.d_model * self.d_hidden * self.bytes_per_element

    @property
    def row_flop(self) -> int:
        """FLOP of one row in a step."""
        # a multiplication and an addition are 2; the backward has two products for each of the forward
        return 3 * 2 * self.num_matrices * self.d_model * self.d_hidden


@dataclass(frozen=True)
class Hardware:
    """One rank of a cluster; it has a network card of its own, or its share of the node's."""

    bandwidth: float  # bytes a second to ranks of its node while all ranks send
    throughput: float  # FLOP a second of its experts
    memory: float = float("inf")  # bytes; infinite where memory does not matter
    latency: float = 0.0  # seconds of an exchange of no size
    ranks_per_node: int | None = None  # None if all ranks are on one node
    node_bandwidth: float = float("inf")  # bytes a second to other nodes
    node_latency: float = 0.0  # seconds of an exchange of no size with other nodes

    @staticmethod
    def measure(
        group: dist.ProcessGroup | None = None,
        layer: Layer = Layer(512, 512),
        rows: int = 1024,
        num_experts: int = 1,
        device: torch.device | None = None,
    ) -> Hardware:
        """Measure the ranks of a group with the shapes of a layer, and return the mean, the same on every rank.

        layer: its experts are computed in 16 bits if its elements have 2 bytes. rows: of each rank, sent evenly to the
        ranks, and evenly to its num_experts experts. device: where these are; None: CUDA for a group of NCCL, else the
        CPU. FMOE_FASTER_GLBPLC_NETBW and FMOE_FASTER_GLBPLC_GPUTP, FastMoE's variables, override what is measured.
        """
        group = group or dist.group.WORLD
        assert group is not None  # there is a default group
        device = device or torch.device("cuda" if backend_of(group, "cuda") == "nccl" else "cpu")
        # 1. The links: to the ranks of this node, and to those of others.
        nodes = find_nodes(group)
        own = next(node for node in nodes if dist.get_rank(group) in node)
        away = [rank for node in nodes if node is not own for rank in node]
        given = _env.get("FMOE_FASTER_GLBPLC_NETBW")
        links = [_measure_link(group, peers, rows, layer, device) for peers in (own, away)]
        # 2. FLOP a second of the forward of ops.expert_mlp.
        throughput = _env.get("FMOE_FASTER_GLBPLC_GPUTP")
        if not throughput:
            gated = layer.num_matrices == 3
            make = functools.partial(torch.ones, dtype=_dtype(layer), device=device)
            x = make(rows, layer.d_model)
            w1 = make(num_experts, (1 + gated) * layer.d_hidden, layer.d_model)
            w2 = make(num_experts, layer.d_model, layer.d_hidden)
            topk_idx = (torch.arange(rows, device=device) * num_experts // rows).unsqueeze(1)
            handle = ops.sort_tokens(topk_idx, num_experts)
            mlp = (x, handle.row_idx, handle.inverse, handle.offs, w1, None, w2, None, None)
            activation = "swiglu" if gated else "gelu"
            with torch.no_grad():
                seconds = _seconds(lambda: ops.expert_mlp(*mlp, activation), device)
            throughput = rows * layer.row_flop / 3 / seconds
        # 3. The mean over the ranks, so that all decide by the same numbers.
        # 0 for a rank alone on its node: its own link is to itself
        has_link = float(len(own) > 1 or len(nodes) == 1)
        of_own = [has_link * number for number in links[0]]
        found = torch.tensor([throughput, *of_own, *links[1], has_link], dtype=torch.float64, device=device)
        dist.all_reduce(found, group=group)
        *sums, num_linked = found.tolist()
        throughput, node_latency, node_bandwidth = (
            total / dist.get_world_size(group) for total in (sums[0], *sums[3:])
        )
        latency, bandwidth = (total / max(num_linked, 1) for total in sums[1:3])
        alone = num_linked == 0  # every rank: none has another link than those between nodes
        return Hardware(
            given or (node_bandwidth if alone else bandwidth),
            throughput,
            latency=node_latency if alone else latency,
            # of unequal nodes the smallest, whose ranks send most to others: a step waits for them
            ranks_per_node=min(map(len, nodes)) if len(nodes) > 1 else None,
            node_bandwidth=given or (node_bandwidth if len(nodes) > 1 else float("inf")),
            node_latency=node_latency,
        )


def _measure_link(
    group: dist.ProcessGroup, peers: Sequence[int], rows: int, layer: Layer, device: torch.device
) -> tuple[float, float]:
    """Measure seconds of an empty exchange, and bytes a second to these ranks while all send; a collective call."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def seconds(each: int) -> float:
        splits = [each * (peer in peers) for peer in range(size)]
        x = torch.ones(sum(splits), layer.d_model, dtype=_dtype(layer), device=device)
        out = torch.empty_like(x)
        return _seconds(lambda: dist.all_to_all_single(out, x, splits, splits, group=group), device, group)

    # Two sizes make a line, seconds over bytes: its slope is 1 / bandwidth, its intercept the latency.
    num_away = len([peer for peer in peers if peer != rank]) or 1
    each = max(rows // size, 8)
    small, large = seconds(1), seconds(each)
    sent = (each - 1) * num_away * layer.row_bytes
    bandwidth = sent / max(large - small, 1e-9)
    return max(small - num_away * layer.row_bytes / bandwidth, 0.0), bandwidth


def _dtype(layer: Layer) -> torch.dtype:
    return {2: torch.bfloat16, 8: torch.float64}.get(layer.bytes_per_element, torch.float32)


def _seconds(
    step: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    """Time a step: the mean over as many as take 20 ms, from 3 to 100."""

    def run(times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    run(2)  # warms up
    # a step with a collective must run equally often on all ranks, or they would wait forever
    once = torch.tensor([run(2)], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(once, dist.ReduceOp.MAX, group=group)
    return run(min(max(math.ceil(0.02 / float(once)), 3), 100))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a forward and backward on the slowest rank, by part, as if nothing overlapped."""

    exchange: float
    compute: float
    shadowing: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all parts, one after the other."""
        return self.exchange + self.compute + self.shadowing

    def overlapped(self, num_chunks: int) -> float:
        """Estimate the seconds with chunks: all but one chunk of the smaller part hides behind the larger."""
        # one chunk cannot hide: nothing computes before the first has come
        hidden = min(self.exchange, self.compute) * (num_chunks - 1) / num_chunks
        return self.total - hidden


def best_overlap(exchange: float, compute: float, latency: float, max_chunks: int) -> int:
    """Choose the number of chunks with the shortest expected step; the smallest of equal ones.

    exchange, compute: seconds of a forward's exchanges, there and back, and of its experts. The backward's exchanges
    take as long, its experts twice as long. latency: seconds of a message of no size; each chunk has four.
    """

    def seconds(num_chunks: int) -> float:
        halves = (StepTime(exchange, compute), StepTime(exchange, 2 * compute))
        return sum(half.overlapped(num_chunks) for half in halves) + 4 * latency * (num_chunks - 1)

    return min(range(1, max_chunks + 1), key=seconds)


def step_time(
    load: Sequence[float], num_ranks: int, layer: Layer, hardware: Hardware, shadows: Sequence[int] = ()
) -> StepTime:
    """Estimate the time of one step.

    load: rows that each expert gets from all ranks, in the order of their places (rank r holds the r-th part), the
    ranks' tokens being alike. shadows: places of experts that every rank computes for its own tokens.
    """
    num_local = len(load) // num_ranks
    local = sum(load[s] for s in shadows) / num_ranks
    shadowed = set(shadows)
    rows = [
        sum(load[s] for s in range(r * num_local, (r + 1) * num_local) if s not in shadowed)
        for r in range(num_ranks)
    ]
    # broadcast of the parameters in the forward, reduction of their gradients in the backward
    moved = 2 * len(shadows) * layer.expert_bytes
    slowest = hardware.bandwidth if _is_one_node(num_ranks, hardware) else hardware.node_bandwidth
    return StepTime(
        # there and back, in the forward and in the backward
        exchange=4 * _exchange_time(rows, sum(load) / layer.top_k, layer, hardware),
        compute=(max(rows) + local) * layer.row_flop / hardware.throughput,
        shadowing=moved / slowest,
    )


def _is_one_node(num_ranks: int, hardware: Hardware) -> bool:
    return hardware.ranks_per_node is None or num_ranks <= hardware.ranks_per_node


def _exchange_time(rows: Sequence[float], tokens: float, layer: Layer, hardware: Hardware) -> float:
    """Estimate the seconds of one way of all ranks' tokens. rows: choices of each rank's experts, but of no shadows.

    A rank's link carries what its experts receive and send back, and what its own tokens send away: the larger. Links
    inside a node and between nodes work at once.
    """
    num_ranks, size = len(rows), hardware.ranks_per_node or len(rows)
    travelling = rows if layer.exchange == "choice" else _distinct(rows, tokens, layer.top_k)
    # rows that the busiest link carries: into a rank's experts, or out of a rank, whose own tokens are an even share
    busiest = max(*travelling, sum(travelling) / num_ranks) if num_ranks > 1 else travelling[0]

    def inside(share: float) -> float:
        return share * busiest * layer.row_bytes / hardware.bandwidth + hardware.latency

    if _is_one_node(num_ranks, hardware):
        return inside((num_ranks - 1) / num_ranks)
    away = (num_ranks - size) / num_ranks
    if layer.exchange != "node":
        between = away * busiest * layer.row_bytes / hardware.node_bandwidth + hardware.node_latency
        return max(inside((size - 1) / num_ranks), between)
    # "node": a token goes once to a node, by its own rank's share of the node's links, and then to ranks inside
    of_nodes = [sum(rows[first : first + size]) for first in range(0, num_ranks, size)]
    nodes = _distinct(of_nodes, tokens, layer.top_k)
    of_rank = max(*nodes, sum(nodes) / len(nodes)) / size
    between = away * of_rank * layer.row_bytes / hardware.node_bandwidth + hardware.node_latency
    return between + inside((size - 1) / size)


def _distinct(rows: Sequence[float], tokens: float, top_k: int) -> list[float]:
    """Estimate how many tokens have a choice in each part of the experts (ranks or nodes). rows: choices in each."""
    if tokens == 0:
        return [0.0] * len(rows)
    # Choices drawn independently: a token misses a part with all of its top_k draws. Some of them are of shadows, which
    # are in no part, so that rows may sum to less than tokens * top_k.
    return [tokens * (1 - (1 - part / (tokens * top_k)) ** top_k) for part in rows]
