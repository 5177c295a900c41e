"""overlap_degree="auto": the number of chunks, from what the exchange and the experts took in the first steps."""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fmoe_ext.ep.cost import best_overlap
from fmoe_ext.ep.exchange import find_group, gather_values
from fmoe_ext.ep.plan import ChunkRows, Plan
from fmoe_ext.ep.schedule import Exchange
from fmoe_ext.routing import DispatchHandle, ExpertInput, Nest

if TYPE_CHECKING:
    from fmoe_ext.ep.expert_parallel import ExpertParallel

logger = logging.getLogger(__name__)

# Forwards measured with one chunk; the first, in which buffers are made, does not count. An even number, so that with
# activation checkpointing the choice comes after a repeated forward and not between a forward and its repetition.
NUM_STEPS = 4


class OverlapTuner:
    """A stopwatch for the first forwards of a layer, and the choice that all ranks of its group then make alike."""

    def __init__(self, group_name: str, layer_index: int):
        self.group = group_name
        self.layer_index = layer_index
        self.steps: list[defaultdict[str, float]] = []  # seconds of each part of each forward
        self._lap_began = 0.0

    @property
    def is_due(self) -> bool:
        return len(self.steps) >= NUM_STEPS

    def begin_exchange(
        self, home: ExpertParallel, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> TimedExchange:
        """An Exchange that is measured."""
        self.steps.append(defaultdict(float))
        self._lap_began = _now(topk_idx.device)
        return TimedExchange(self, home, x, topk_idx, topk_weights)

    def lap(self, part: str, device: torch.device) -> None:
        """The time since the last call belongs to a part of the step."""
        now = _now(device)
        self.steps[-1][part] += now - self._lap_began
        self._lap_began = now

    def choose(self, max_chunks: int) -> int:
        """The number of chunks; a collective call."""
        steps = self.steps[1:]
        mine = [statistics.median(step[part] for step in steps) for part in ("counts", "exchange", "compute")]
        group = find_group(self.group)
        of_ranks = list(zip(*gather_values(mine, group), strict=True))
        # Who comes last does not wait for others: the shortest time of a message is the message's own.
        latency, exchange, compute = min(of_ranks[0]), min(of_ranks[1]), max(of_ranks[2])
        num_chunks = best_overlap(exchange, compute, latency, max_chunks)
        if dist.get_rank(group) == 0:
            logger.info(
                'layer %d of the group of ranks %s: overlap_degree="auto" is %d (exchange %.3g ms, compute %.3g ms, '
                "%.3g ms for a small message)",
                *(self.layer_index, dist.get_process_group_ranks(group), num_chunks),
                *(1e3 * exchange, 1e3 * compute, 1e3 * latency),
            )
        return num_chunks


class TimedExchange(Exchange):
    """An Exchange whose phases say to a tuner when they end."""

    def __init__(
        self,
        tuner: OverlapTuner,
        home: ExpertParallel,
        x: Nest,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ):
        super().__init__(home, x, topk_idx, topk_weights)
        self._tuner = tuner

    def _lap(self, part: str) -> None:
        self._tuner.lap(part, self._topk_idx.device)

    def _sort(self) -> DispatchHandle:
        handle = super()._sort()
        self._lap("sort")
        return handle

    def _exchange_counts(self, handle: DispatchHandle) -> Plan:
        plan = super()._exchange_counts(handle)
        self._lap("counts")
        return plan

    def _pack(self) -> tuple[list[torch.Tensor], list[ChunkRows]]:
        packed = super()._pack()
        self._lap("permute")
        return packed

    def receive(self, number: int) -> ExpertInput:
        received = super().receive(number)
        self._lap("exchange")
        return received

    def give_back(self, number: int, results: Nest) -> None:
        self._lap("compute")
        super().give_back(number, results)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        returned = super()._collect()
        self._lap("exchange")
        return returned


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
