"""LayerCounters: the counters of one gate, on its device; LoadMonitor (load.py) has one for each gate.

They count the tokens of each expert, its forwards without one, dropped choices, tokens and forwards, and sum up the
entropy of the weights.

Counting must cost a step little and must never wait for the device. So it has two speeds:

    count()    in each forward: one operator counts the experts' tokens, another copies the weights of a sample of
               tokens, and both results are noted
    sum_up()   every _MAX_NOTED forwards, or when a sum is read: adds what was noted, by a few operations a forward

A compiled program and a CUDA graph replay operators without this code, so that nothing would be summed up later: there
each forward is added at once. Forwards that were noted before a graph was captured are summed up after its replays, but
count as before them for idle_steps, the one counter that depends on order; once there is a graph nothing is noted.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fmoe_ext.step import count_choices

_ENTROPY_SAMPLE = 512  # tokens of a forward whose entropy is computed, to twice as many; all of fewer
_MAX_NOTED = 32  # forwards that are summed up together, so that the counters change once for all


class _Forward(NamedTuple):
    load: torch.Tensor  # [E]
    num_wanted: int  # choices, if none had been dropped
    num_tokens: int
    weights: torch.Tensor  # [S, K] of a sample of the tokens


def _summed(name: str) -> Any:
    """Make a property that sums up what was noted before the counter is read or set."""

    def get(counters: "LayerCounters") -> torch.Tensor:
        counters.sum_up()
        return counters._sums[name]

    def put(counters: "LayerCounters", value: torch.Tensor) -> None:  # counter += load sets it, too
        counters.sum_up()
        counters._sums[name] = value

    return property(get, put)


class LayerCounters:
    """The running counts of one gate, on its device."""

    NAMES = ("tokens_per_expert", "idle_steps", "num_dropped", "num_tokens", "gate_entropy_sum", "num_steps")

    tokens_per_expert = _summed("tokens_per_expert")  # [E] int64
    idle_steps = _summed("idle_steps")  # [E] int64, forwards since the last token
    num_dropped = _summed("num_dropped")
    num_tokens = _summed("num_tokens")
    num_steps = _summed("num_steps")
    gate_entropy_sum = _summed("gate_entropy_sum")  # float64

    def __init__(self, num_experts: int, device: torch.device | str) -> None:
        self._noted: list[_Forward] = []
        self._has_graph = False  # a CUDA graph adds forwards too
        self._num_replayed = torch.zeros((), dtype=torch.int64, device=device)  # by graphs, since sum_up()
        self._lock = threading.RLock()  # threads may count at once; reset() holds it while it sums up
        self._num_experts = num_experts
        self._sums = {name: torch.zeros((), dtype=torch.int64, device=device) for name in self.NAMES}
        self._sums["gate_entropy_sum"] = torch.zeros((), dtype=torch.float64, device=device)
        for name in ("tokens_per_expert", "idle_steps"):
            self._sums[name] = torch.zeros(num_experts, dtype=torch.int64, device=device)

    def to(self, device: torch.device | str) -> None:
        """Move the counters to a device."""
        # forwards that train will write to the sums, which inference tensors refuse
        with self._lock, torch.inference_mode(False):
            self.sum_up()
            self._sums = {name: value.to(device) for name, value in self._sums.items()}
            self._num_replayed = self._num_replayed.to(device)

    @torch.no_grad()
    def count(self, topk_idx: torch.Tensor, topk_weights: torch.Tensor, top_k: int | None = None) -> None:
        """Count a forward: topk_idx, topk_weights [T, K]; top_k: choices that a token should have, if K is more."""
        if topk_idx.device != self._sums["num_steps"].device:
            self.to(topk_idx.device)
        num_tokens, num_columns = topk_idx.shape
        forward = _Forward(
            count_choices(topk_idx, self._num_experts),
            num_tokens * (num_columns if top_k is None else min(top_k, num_columns)),
            num_tokens,
            # of many tokens every n-th speaks for n
            topk_weights.reshape(topk_idx.shape)[:: max(1, num_tokens // _ENTROPY_SAMPLE)].clone(),
        )
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            self._add([forward])
            return
        if _is_captured(topk_idx):
            self._has_graph = True
            self._add([forward])
            self._num_replayed += 1
            return
        with self._lock:
            if self._has_graph:
                self.sum_up()
                self._add([forward])
                return
            self._noted.append(forward)
            if len(self._noted) >= _MAX_NOTED:
                self.sum_up()

    @torch.no_grad()
    def sum_up(self) -> None:
        """Add the forwards that were noted to the sums."""
        with self._lock:
            noted, self._noted = self._noted, []
            if noted:
                self._add(noted, self._num_replayed)
            if self._has_graph:
                self._num_replayed.zero_()

    def reset(self) -> None:
        """Set the sums to zero, except how long experts have been idle."""
        with self._lock:
            for name in self.NAMES:
                if name != "idle_steps":
                    getattr(self, name).zero_()

    def _add(self, noted: Sequence[_Forward], num_since: torch.Tensor | int = 0) -> None:
        """Add forwards to the sums, by a few operations each; none waits for the device.

        num_since: forwards after these that are in the sums already.
        """
        sums, num = self._sums, len(noted)
        loads = torch.stack([forward.load for forward in noted])  # [num, E]
        sums["tokens_per_expert"] += loads.sum(0)
        numbers = torch.arange(1, num + 1, device=loads.device).unsqueeze(1)
        last = (numbers * (loads > 0)).amax(0)  # [E], the last forward with a token, 0 for none
        idle = sums["idle_steps"]
        idle_now = torch.where(last == 0, idle + num, num - last + num_since)
        idle.copy_(torch.where(idle < num_since, idle, idle_now))  # fewer: it has had a token since
        # one by one: a forward with more choices than wanted must not hide what another dropped
        for forward, num_kept in zip(noted, loads.sum(1), strict=True):
            sums["num_dropped"] += (forward.num_wanted - num_kept).clamp(min=0)
        sums["num_tokens"] += sum(forward.num_tokens for forward in noted)
        sums["num_steps"] += num
        # entropies: forwards with one K together
        for top_k in {forward.weights.shape[1] for forward in noted}:
            same = [forward for forward in noted if forward.weights.shape[1] == top_k]
            weights = torch.cat([forward.weights for forward in same])
            weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
            tiny = torch.finfo(weights.dtype).tiny
            share = weights / weights.sum(1, keepdim=True).clamp(min=tiny)
            entropies = -(share * share.clamp(min=tiny).log()).sum(1)
            samples = entropies.split([len(forward.weights) for forward in same])
            # a sample speaks for all tokens of its forward; entropies are divided by log K, and 0 for one choice
            per_token = [forward.num_tokens / max(len(forward.weights), 1) for forward in same]
            total = torch.stack(
                [sample.sum() * each for sample, each in zip(samples, per_token, strict=True)]
            )
            sums["gate_entropy_sum"] += total.sum() / math.log(max(top_k, 2))


def _is_captured(x: torch.Tensor) -> bool:
    """Return whether a CUDA graph records what is done with x."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
