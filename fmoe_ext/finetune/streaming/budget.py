"""Decide how many bytes the buffers for experts of a streamed model have: ExpertStream, model.expert_stream.

Before the first step the budget is arithmetic:

    memory - a quarter of it, for activations and the program
           - weights outside of the experts, adapters, their gradients, the optimizer's state
           = buffers for experts

A quarter is a guess, so each step is measured: before() notes the most memory that the process had, just before the
optimizer steps, and before the next step _measure() takes from the buffers what a step like the largest so far would
exceed the limits by. Buffers never shrink between a forward and its backward, which reads the same parts again.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from fmoe_ext import ops
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.finetune.streaming.placeholder import StreamedWeight
from fmoe_ext.finetune.streaming.pool import PARTS, Pool, Statistics, bytes_of_experts
from fmoe_ext.finetune.streaming.progress import Steps
from fmoe_ext.memory import Memory, Process, process, restart_peak, room_of_process, trim_heap
from fmoe_ext.optimizer_steps import follow_optimizers, has_a_parameter_of

_FREE_SHARE = 4  # a quarter of the memory is for activations and the program
_MOMENTS = 2  # state of an optimizer before its first step: those of Adam, in the dtype of the weight
MARGIN = 16  # a sixteenth of what the limits leave stays free: heaps have gaps, and the system needs some


def least_memory(layers: Sequence[Layer], resident: int, is_whole: bool = False) -> int:
    """Count the bytes that stream(memory=) needs for layers of experts beside what stays in memory.

    is_whole: to keep all experts after they were read once.
    """
    if not layers:
        buffers = 0
    elif is_whole:
        buffers = len(layers) * bytes_of_experts(layers)
    else:
        buffers = PARTS * bytes_of_experts(layers, 1)
    return math.ceil((resident + buffers) * _FREE_SHARE / (_FREE_SHARE - 1))


class _Seen(NamedTuple):
    """The largest forward and backward so far, in bytes."""

    most: int  # memory of the process, at its peak
    buffers: int  # for experts, at that time
    state: int  # of optimizers, at that time


class ExpertStream:
    """The experts of a model in their files, and the buffers for some of them: model.expert_stream.

    optimizer_bytes: of state for each trained number, as the user expects; after a step the real state counts.
    reads_through_cache: True if the system's page cache keeps the files, because all limits leave memory for them
    beside the model; False if reads go past it (O_DIRECT), because a memory cgroup would charge those pages.
    Its before() and after() are called by optimizers that step weights of the model (follow_optimizers), before_step()
    by the first layer of a forward. Raises ValueError, with the arithmetic, if memory is too little.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        memory: Memory,
        optimizer_bytes: float | None = None,
    ) -> None:
        self.memory = memory.num_bytes
        self.steps: Steps | None = None  # if stream() was given progress=
        self.activations: Any = None  # an ActivationFile, if stream() was given a folder for it
        self._source = memory.source
        self._model = weakref.ref(model)
        self._optimizer_bytes = optimizer_bytes
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of weights of the model
        self.is_counted = False  # by before_step(), since the last optimizer's step
        self._has_stepped = False  # an optimizer, since the last forward
        self._counting = threading.Lock()  # guards before_step()
        self._seen = _Seen(0, 0, 0)
        self._has_trained = False  # a forward in training has begun
        self._most_buffers: int | None = None  # bytes that a step leaves to them, once a step was measured
        # bytes of the weights outside of the experts
        self._dense = sum(map(_bytes_of, self.resident_tensors()))
        self._gradients = self._state = 0  # bytes in training, as far as they are known
        for_experts = self._left(0)
        self._least = PARTS * bytes_of_experts(layers, 1)
        if for_experts < self._least:
            raise ValueError(self._arithmetic(0))
        whole = max(layer.num_bytes(layer.num_experts) for layer in layers)
        # The page cache may keep the files if that leaves the process its memory: weights, buffers, the free quarter.
        held = self._dense + min(for_experts, whole * len(layers)) + self.memory // _FREE_SHARE
        in_files = sum(span.num_bytes for layer in layers for span in layer.every_span())
        self.reads_through_cache = memory.free - held >= in_files
        self.pool = Pool(layers, for_experts, self.reads_through_cache)
        follow_optimizers(model, self)
        # memory= may be more than the limits allow: warn if less than a quarter of the limit stays free.
        limit = memory.limit
        held = self._dense + min(self.pool.num_bytes, self.pool.layer_bytes * len(layers))
        if limit is not None and held > limit.num_bytes - limit.num_bytes // _FREE_SHARE:
            warnings.warn(
                f"memory={memory.num_bytes:,} bytes lets the model hold {held:,}, but this process has a limit: "
                f'{limit}. The system ends a process that exceeds it. Give less, or memory="auto"',
                stacklevel=3,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStream:
        return self

    @property
    def statistics(self) -> Statistics:
        """Counts of reads since the last reset_statistics()."""
        return self.pool.statistics

    def reset_statistics(self) -> None:
        """Begin to count anew."""
        self.pool.statistics = Statistics()

    def resident_tensors(self) -> list[Tensor]:
        """List the parameters and buffers of the model that are in memory, tied ones once."""
        model = self._model()
        if model is None:
            return []
        found: dict[int, Tensor] = {}  # by address, the first of tied ones
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, StreamedWeight):
                found.setdefault(tensor.data_ptr(), tensor)
        return list(found.values())

    def before(self, optimizer: Optimizer) -> None:
        """Note the most memory that the process had; empty the buffers if the optimizer's step needs their memory."""
        trained = self._trained()
        memory = process() if has_a_parameter_of(optimizer, trained) else None
        if memory is None:
            return
        state = bytes_of_state(self._optimizers)
        # a second optimizer comes after the first one's step, whose memory is not that of forward and backward
        if not self._has_stepped and memory.most > self._seen.most:
            self._seen = _Seen(memory.most, self.pool.bytes_in_use, state)
        # torch's optimizers have a tensor more for each weight while they step many at once
        needed = max(0, self._state - state) + sum(map(_bytes_of, trained))
        room = _room(memory)
        if room is not None and memory.now + needed > room:
            self.pool.forget()
            _trim()

    def after(self, optimizer: Optimizer) -> None:
        """Note an optimizer that stepped weights of the model."""
        if has_a_parameter_of(optimizer, self._trained()):
            self._optimizers.add(optimizer)
            self._has_stepped = True
            self.is_counted = False

    def before_step(self, is_training: bool) -> None:
        """Make room for adapters, gradients and the optimizer; ValueError, with the arithmetic, if there is none."""
        with self._counting:  # several threads may begin a step at once
            # generation before any training has neither gradients nor state
            if is_training or self._has_stepped:
                trained = self._trained()
                self._gradients = sum(map(_bytes_of, trained))
                if self._optimizers:
                    self._state = bytes_of_state(self._optimizers)
                elif self._optimizer_bytes is None:  # before the first step, what an optimizer will have
                    self._state = _MOMENTS * sum(map(_bytes_of, trained))
                else:
                    self._state = math.ceil(self._optimizer_bytes * sum(t.numel() for t in trained))
                if self._has_stepped:
                    self._most_buffers = self._measure()
                self._has_stepped = False
            self.is_counted = True
            adapters = sum(map(_bytes_of, self.resident_tensors())) - self._dense
            left = self._left(adapters)
            if left < self._least:
                raise ValueError(self._arithmetic(adapters))
            if self._most_buffers is not None:
                left = min(left, self._most_buffers)
            # a change forgets what was read, so growing waits until it adds a buffer
            if left < self.pool.num_bytes or self.pool.would_grow(left):
                self.pool.resize(left)
            if is_training and not self._has_trained:
                self._has_trained = True
                restart_peak()  # generation before had larger buffers: its peak would count as that of a step

    def _measure(self) -> int | None:
        """Count the bytes that buffers may have in a step like the largest so far; None if they need not shrink."""
        memory = process()
        room = None if memory is None else _room(memory)
        if room is None or not self._seen.most:
            return None
        # the largest step may have come before the optimizer made its state, which stays from now on
        excess = self._seen.most + max(0, self._state - self._seen.state) - room
        if excess <= 0:
            return None
        _trim()  # or what is freed would still count as the process's
        left = max(self._least, self._seen.buffers - excess)
        if left < self.pool.num_bytes:
            warnings.warn(
                f"a step had {self._seen.most:,} bytes of memory, and optimizers have made "
                f"{self._state - self._seen.state:,} of state since, but the limits leave {room:,} to this process: "
                f"buffers for experts shrink from {self.pool.num_bytes:,} to {left:,}. "
                + ("That may not be enough. " if left > self._seen.buffers - excess else "")
                + "A smaller batch or stream(..., activations=) needs less",
                stacklevel=2,
            )
        return left

    def _trained(self) -> list[nn.Parameter]:
        return [t for t in self.resident_tensors() if isinstance(t, nn.Parameter) and t.requires_grad]

    def _left(self, adapters: int) -> int:
        """Count the bytes that are left for experts. adapters: their bytes."""
        others = self._dense + adapters + self._gradients + self._state
        return self.memory - self.memory // _FREE_SHARE - others

    def _arithmetic(self, adapters: int) -> str:
        """Write the error for too little memory: a sum with every term, and what to change about it."""
        rows = [
            ("weights outside of the experts", self._dense),
            (f"{PARTS} experts", self._least),
            ("activations and the program, a quarter of memory", self.memory // _FREE_SHARE),
        ]
        # terms of training, each with what makes it smaller
        more = ""
        if adapters:
            rows.append(("adapters", adapters))
            more = "; take a smaller rank, or adapt fewer layers"
        if self._gradients:
            rows.append(("gradients of trained weights", self._gradients))
            if self._optimizers:
                state = "state of " + ", ".join(sorted({type(o).__name__ for o in self._optimizers}))
            elif self._optimizer_bytes is None:
                state = "two moments of Adam"
            else:
                state = f"state of the optimizer, optimizer_bytes={self._optimizer_bytes:g}"
            rows.append((state, self._state))
            more += (
                ", or an optimizer with less state: docs/finetune.md lists some, "
                "and stream(..., optimizer_bytes=2.1) plans for 8-bit moments"
            )
        text = " + ".join(f"{value:,} ({name})" for name, value in rows)
        total = sum(value for _, value in rows)
        return f"memory={self.memory:,} bytes{self._source} is too little: {text} = {total:,}{more}"


def _trim() -> None:
    """Return to the system what the heap and our operators keep of freed tensors."""
    ops.release_memory()
    trim_heap()


def _room(memory: Process) -> int | None:
    """Count the bytes that this process may have by the limits, less the margin; None without limits."""
    room = room_of_process(memory.now)
    return None if room is None else room - room // MARGIN


def bytes_of_state(optimizers: Iterable[Optimizer]) -> int:
    """Count the bytes of tensors in the state of optimizers, shared ones once, packed ones as they are packed."""
    found: dict[int, int] = {}
    # a state may nest: 8-bit optimizers have dicts of blocks, and others tensors that wrap packed ones
    waiting: list[Any] = [optimizer.state for optimizer in optimizers]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif hasattr(value, "__tensor_flatten__"):
            waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, Tensor):
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
