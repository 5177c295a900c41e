"""Cost model of an expert-parallel layer: bytes to send and FLOP to compute, over what a rank's hardware can do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fmoe_ext import _env


@dataclass(frozen=True)
class Hardware:
    """One rank of a cluster.

    bandwidth: bytes a second that it sends while all ranks do. throughput: FLOP a second of its experts.
    memory: bytes; infinite where memory does not matter.
    """

    bandwidth: float
    throughput: float
    memory: float = float("inf")

    @staticmethod
    def measure(
        group: dist.ProcessGroup | None = None, num_bytes: int = 1 << 22, size: int = 512
    ) -> Hardware:
        """Measures both on all ranks of a group, and returns the mean, the same on every rank.

        FMOE_FASTER_GLBPLC_NETBW and FMOE_FASTER_GLBPLC_GPUTP, FastMoE's numbers, go before what is measured.
        """
        world_size = dist.get_world_size(group)
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        x = torch.ones(world_size, num_bytes // world_size // 4, device=device)
        a = torch.ones(size, size, device=device)

        def seconds(step: Callable[[], object]) -> float:
            step()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / 3

        out = torch.empty_like(x)
        exchange = seconds(lambda: dist.all_to_all_single(out, x, group=group))
        matmul = seconds(lambda: a @ a)
        away = x.numel() * 4 * max(world_size - 1, 1) / world_size
        bandwidth = _env.get("FMOE_FASTER_GLBPLC_NETBW") or away / exchange
        throughput = _env.get("FMOE_FASTER_GLBPLC_GPUTP") or 2 * size**3 / matmul
        found = torch.tensor([bandwidth, throughput], dtype=torch.float64, device=device)
        dist.all_reduce(found, group=group)
        return Hardware(*(found / world_size).tolist())


@dataclass(frozen=True)
class Layer:
    """The sizes of one layer. num_matrices: 2, or 3 for gated experts."""

    d_model: int
    d_hidden: int
    num_matrices: int = 2
    bytes_per_element: int = 4

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
        """Forward and backward of one row."""
        return 3 * 2 * self.num_matrices * self.d_model * self.d_hidden


@dataclass(frozen=True)
class StepTime:
    """Seconds of a forward and backward, as if nothing overlapped, and their parts on the slowest rank."""

    exchange: float
    compute: float
    shadowing: float = 0.0

    @property
    def total(self) -> float:
        """Seconds, nothing overlapped."""
        return self.exchange + self.compute + self.shadowing

    def overlapped(self, num_chunks: int) -> float:
        """With num_chunks chunks: all but one chunk of the smaller part hides behind the larger."""
        hidden = min(self.exchange, self.compute) * (num_chunks - 1) / num_chunks
        return self.total - hidden


def best_overlap(exchange: float, compute: float, latency: float, max_chunks: int) -> int:
    """The number of chunks with the shortest expected step; the smallest of equal ones.

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
    """Expected time of one step.

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
    # A rank's link carries what its experts receive and send back, and what its own tokens send away: the larger.
    away = (num_ranks - 1) / num_ranks
    busiest = max(*rows, sum(rows) / num_ranks) * away
    # broadcast of the parameters in the forward, reduction of their gradients in the backward
    moved = 2 * len(shadows) * layer.expert_bytes
    return StepTime(
        exchange=4 * busiest * layer.row_bytes / hardware.bandwidth,
        compute=(max(rows) + local) * layer.row_flop / hardware.throughput,
        shadowing=moved / hardware.bandwidth,
    )
