"""Choose overlap_degree="auto" and exchange="auto" by the times of the first forwards.

Each exchange runs for NUM_STEPS forwards under a stopwatch, which waits for the device after each phase (Exchange.lap).
The ranks then share their medians, and all choose what is fastest on the slowest rank. ExpertParallel.choose_route()
asks the Tuner before each forward, until it is done.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fmoe_ext.ep.cost import best_overlap
from fmoe_ext.ep.process_groups import find_group, gather_values

logger = logging.getLogger(__name__)

# Forwards measured of each exchange; the first, in which buffers are made, does not count. An even number, so that with
# activation checkpointing the choice comes after a repeated forward and not between a forward and its repetition.
NUM_STEPS = 4


class Stopwatch:
    """Times of some forwards of a layer, by part: "sort", "counts", "permute", "exchange", "compute".

    With exchange="node" these are of the step inside nodes, and "across" is the other step.
    """

    def __init__(self) -> None:
        self.steps: list[defaultdict[str, float]] = []  # seconds of each part of each forward
        self._lap_began = 0.0

    def begin(self, device: torch.device) -> None:
        """Begin the times of a forward."""
        self.steps.append(defaultdict(float))
        self._lap_began = _now(device)

    def lap(self, part: str, device: torch.device) -> None:
        """Give the time since the last call to a part of the forward."""
        now = _now(device)
        self.steps[-1][part] += now - self._lap_began
        self._lap_began = now

    def medians(self) -> dict[str, float]:
        """Compute the seconds of each part, and of all of them as "whole"."""
        steps = self.steps[1:]  # buffers are made in the first
        parts = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
        return {**parts, "whole": statistics.median(sum(step.values()) for step in steps)}


class Tuner:
    """Stopwatches for the first forwards of a layer, and the choices that all ranks of its group then make alike.

    exchanges: those to choose from, the first of equally fast ones. tunes_overlap: whether to choose a number of
    chunks; then what is measured has one. All ranks call choose() before each forward.
    """

    def __init__(
        self, group_name: str, layer_index: int, exchanges: Sequence[str], tunes_overlap: bool
    ) -> None:
        self.group = group_name
        self.layer_index = layer_index
        self.tunes_overlap = tunes_overlap
        self.watches = {name: Stopwatch() for name in exchanges}
        self.is_done = False

    @property
    def is_due(self) -> bool:
        """True if everything is measured."""
        return self._next() is None

    def choose(self, max_chunks: int) -> tuple[str, int | None]:
        """Choose the exchange of the next forward, and its number of chunks where that is chosen now.

        A collective call where is_due; then is_done.
        """
        if (unmeasured := self._next()) is not None:
            return unmeasured, None
        mine = {name: watch.medians() for name, watch in self.watches.items()}
        of_ranks = gather_values(mine, find_group(self.group))
        # a step waits for its slowest rank
        whole = {name: max(rank[name]["whole"] for rank in of_ranks) for name in self.watches}
        exchange = min(self.watches, key=whole.__getitem__)
        num_chunks = None
        if self.tunes_overlap:
            times = [rank[exchange] for rank in of_ranks]
            # The rank that comes last to a message waits for nobody: the shortest time is the message's own.
            latency = min(rank["counts"] for rank in times)
            travel = min(rank["exchange"] for rank in times)
            compute = max(rank["compute"] for rank in times)
            num_chunks = best_overlap(travel, compute, latency, max_chunks)
            self._say(
                'overlap_degree="auto" is %d (exchange %.3g ms, compute %.3g ms, %.3g ms for a small message)',
                num_chunks, 1e3 * travel, 1e3 * compute, 1e3 * latency,
            )  # fmt: skip
        if len(self.watches) > 1:
            text = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in whole.items())
            self._say('exchange="auto" is "%s" (%s)', exchange, text)
        self.is_done = True
        return exchange, num_chunks

    def _next(self) -> str | None:
        """Name an exchange that is not measured yet."""
        return next((name for name, watch in self.watches.items() if len(watch.steps) < NUM_STEPS), None)

    def _say(self, text: str, *values: object) -> None:
        group = find_group(self.group)
        if dist.get_rank(group) == 0:
            ranks = dist.get_process_group_ranks(group)
            logger.info("layer %d of the group of ranks %s: " + text, self.layer_index, ranks, *values)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
