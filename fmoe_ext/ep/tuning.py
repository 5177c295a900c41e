"""overlap_degree="auto": the number of chunks, from what the exchange and the experts took in the first steps."""

import logging
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from fmoe_ext.ep.cost import best_overlap
from fmoe_ext.ep.exchange import find_group, gather_values

logger = logging.getLogger(__name__)

# Forwards measured with one chunk; the first, in which buffers are made, does not count. An even number, so that with
# activation checkpointing the choice comes after a repeated forward and not between a forward and its repetition.
NUM_STEPS = 4


class OverlapTuner:
    """A stopwatch for the first forwards of a layer, and the choice that all ranks of its group then make alike."""

    def __init__(self, group_name, layer_index):
        self.group = group_name
        self.layer_index = layer_index
        self._steps = []
        self._lap_began = None

    @property
    def is_due(self):
        return len(self._steps) >= NUM_STEPS

    def begin_step(self, device):
        self._steps.append(defaultdict(float))
        self._lap_began = _now(device)

    def lap(self, part, device):
        """The time since the last call belongs to a part of the step."""
        now = _now(device)
        self._steps[-1][part] += now - self._lap_began
        self._lap_began = now

    def choose(self, max_chunks):
        """The number of chunks; a collective call."""
        steps = self._steps[1:]
        mine = [statistics.median(step[part] for step in steps) for part in ("counts", "exchange", "compute")]
        group = find_group(self.group)
        latency, exchange, compute = zip(*gather_values(mine, group), strict=True)
        # Who comes last does not wait for others: the shortest time of a message is the message's own.
        latency, exchange, compute = min(latency), min(exchange), max(compute)
        num_chunks = best_overlap(exchange, compute, latency, max_chunks)
        if dist.get_rank(group) == 0:
            logger.info(
                'layer %d of the group of ranks %s: overlap_degree="auto" is %d (exchange %.3g ms, compute %.3g ms, '
                "%.3g ms for a small message)",
                *(self.layer_index, dist.get_process_group_ranks(group), num_chunks),
                *(1e3 * exchange, 1e3 * compute, 1e3 * latency),
            )
        return num_chunks


def _now(device):
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()
