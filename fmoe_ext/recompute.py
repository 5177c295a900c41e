"""Match a forward that activation checkpointing repeats in the backward with its original, whose routing it reuses.

A checkpoint drops what a forward keeps and runs the forward again in the backward. The second one must make the choices
of the first, though its input may differ in the last bits, and must not wait for other ranks. So each forward that may
be repeated leaves a record (Forward): its choices, and what it got from other ranks. step.py calls, for each layer:

    forward     Forwards.begin() -> record -> Forwards.keep(): it lives as long as the graph of the output
    repetition  Forwards.find()  -> the record, of the original that it is taken for

A forward that runs inside a backward is a repetition: so it is with torch.utils.checkpoint (reentrant or not), which
Transformers calls, with Megatron-core and with DeepSpeed. ModuleTracker of torch says in public that a backward runs;
nothing public says which forward is repeated (docs/design.md lists what was tried). So, of the layer's records:
    1. those of this thread: a backward on the CPU repeats forwards on the thread that called it. Those of a GPU are
       repeated on a thread of autograd, which has none of its own and asks those of all;
    2. the one whose input is nearest, by a sample of its numbers; on a GPU a single record is taken as it is, for
       comparing would wait for the device;
    3. of those with the same input, the one that found PyTorch's generator as it is now (a checkpoint restores it);
    4. of those, the one not repeated yet, then the last, for autograd goes backwards.

A selective checkpoint compares the operators of both forwards, so that there a repetition computes everything again.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

from fmoe_ext.ops.batch_invariant import is_batch_invariant
from fmoe_ext.tokens import Batch, Nest, leaves_of

_SAMPLE = 64  # numbers of an input that are kept to know it by
# relative L1 distance up to which two samples count as of one input; two random inputs have 0.7
_MAX_DISTANCE = 0.4
_MAX_WITHOUT_GRAPH = 64  # records of forwards under no_grad that a layer keeps of each thread

# the thread for which this one computes (pipeline/overlap.py), 0 for none
works_for: ContextVar[int] = ContextVar("the thread whose work this one does", default=0)


def current_thread() -> int:
    """Return the number of the thread whose forwards these are."""
    return works_for.get() or threading.get_ident()


def is_repeated() -> bool:
    """Return whether this forward repeats an earlier one."""
    return not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()) and bool(
        _tracker().is_bw
    )


@functools.cache
def _tracker() -> ModuleTracker:
    return ModuleTracker()


def can_be_repeated(without_graph: bool) -> bool:
    """Return whether activation checkpointing may repeat the forward that begins now.

    With a graph: if it runs under hooks for saved tensors, by which a checkpoint without reentrance drops them. Without
    a graph, as a reentrant checkpoint runs a forward: as the caller says, without_graph.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return False
    if not torch.is_grad_enabled():
        return without_graph
    # the public way to ask: disabling hooks raises where there are some
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("only asks whether there are hooks"):
            return False
    except RuntimeError:
        return True


@dataclass(eq=False)
class Forward:
    """The record of one forward of a layer: its choices and messages, for its repetition."""

    num_tokens: int
    sample: torch.Tensor  # numbers of its input, to know it by
    generator: torch.Tensor  # the state of PyTorch's generator, to know it by
    batch: Batch
    number: int = 0  # of the layer's forwards, counted from 1
    selected: torch.Tensor | None = None  # [T, K] of a small dtype: choices before any drop; None: not yet
    kept: torch.Tensor | None = None  # [T, K]: those that were left
    # the gate chose and weighed in one operator, which keeps other tensors than two operators
    is_fused: bool = True
    microbatch: int | None = None  # its number where losses span several (gates.accumulation)
    way: Any = None  # the route of its tokens between ranks
    is_done: bool = False  # a repetition has found it
    messages: list[torch.Tensor] = field(default_factory=list)  # results of exchanges between ranks, in order
    num_replayed: int = 0  # how many of these the repetition has used
    # groups in which a rank had no tokens: it cannot find its original and exchanges again, so that all must
    groups_with_empty_rank: set[str] = field(default_factory=set)
    thread: int = field(default_factory=current_thread)
    is_batch_invariant: bool = field(default_factory=is_batch_invariant)

    def run_or_replay(self, exchange: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Call exchange(), or, in a repetition, copy what it returned in the original."""
        if self.is_done and self.num_replayed < len(self.messages):
            self.num_replayed += 1
            return self.messages[self.num_replayed - 1].clone()
        received = exchange()
        if not self.is_done:
            self.messages.append(received.detach().clone())
        return received

    def choose(
        self, selected: torch.Tensor | None, kept: torch.Tensor, is_fused: bool, num_experts: int
    ) -> None:
        """Keep the gate's choices, before any was dropped (None: as kept) and after."""
        self.kept = _compact(kept, num_experts)
        self.selected = self.kept if selected is None or selected is kept else _compact(selected, num_experts)
        self.is_fused = is_fused


class Forwards:
    """The records of the forwards of one layer that may be repeated.

    One with a graph lives as long as the graph. One without, as a reentrant checkpoint runs a forward, lives until its
    thread's first forward after its repetition (a checkpoint in a checkpoint repeats it twice); there are at most
    _MAX_WITHOUT_GRAPH of a thread, the last ones, and a repetition that misses one warns. Copies of a layer begin with
    none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both lists
        self._with_graph: list[weakref.ref[Forward]] = []
        self._without: list[Forward] = []
        self._has_dropped = False  # a record that nothing had repeated; said once, if a repetition misses one
        self._numbers = itertools.count(1)

    def __reduce__(self) -> tuple[type[Forwards], tuple[()]]:
        return Forwards, ()

    def begin(self, first: torch.Tensor, batch: Batch) -> Forward:
        """Make the record of a forward that begins, not yet kept. first [T, *]: the first tensor of its input."""
        state = _generator_state(first.device)
        return Forward(first.shape[0], _sample(first), state, batch, next(self._numbers))

    def find(self, first: torch.Tensor) -> Forward | None:
        """Find the record of the forward that this one repeats; None if none was kept."""
        with self._lock:
            alive = [forward for forward in (ref() for ref in self._with_graph) if forward is not None]
            same = [f for f in (*alive, *self._without) if f.num_tokens == first.shape[0]]
        # this thread's own first; then all, as a thread of autograd has none
        thread = current_thread()
        own = [forward for forward in same if forward.thread == thread]
        found = _nearest(first, own) if own else None
        if found is None and len(own) < len(same):
            found = _nearest(first, same)
        if found is not None:
            found.is_done, found.num_replayed = True, 0
        elif self._has_dropped:
            self._has_dropped = False
            warnings.warn(
                "a checkpoint repeats a forward of which no record is left, so that its tokens choose experts anew: of "
                "forwards under no_grad, as a reentrant checkpoint runs them, a layer keeps the last "
                f"{_MAX_WITHOUT_GRAPH} of each thread. Use torch.utils.checkpoint(use_reentrant=False), or fewer "
                "microbatches before their backward",
                stacklevel=2,
            )
        return found

    def keep(self, forward: Forward, out: Nest, training: bool) -> None:
        """Keep a record as long as its output can be asked for gradients."""
        # This forward is outside of a backward (Step.end() keeps no other): this thread's repetitions are over.
        if self._without:
            with self._lock:
                self._without = [f for f in self._without if not f.is_done or f.thread != forward.thread]
        if not torch.is_grad_enabled():
            # in evaluation only with padding, which would not be known when it is repeated
            if training or forward.batch.rows is not None:
                with self._lock:
                    own = [f for f in self._without if f.thread == forward.thread]
                    if len(own) >= _MAX_WITHOUT_GRAPH:
                        self._without.remove(own[0])
                        self._has_dropped = True
                    self._without.append(forward)
            return
        # the graph's node holds the record, and we hold it weakly: it goes when the graph goes
        nodes = [leaf.grad_fn for leaf in leaves_of(out) if leaf.grad_fn is not None]
        for node in nodes[:1]:
            node.metadata["fmoe_ext.forward"] = forward
            with self._lock:
                self._with_graph = [ref for ref in self._with_graph if ref() is not None]
                self._with_graph.append(weakref.ref(forward))


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Take a few numbers of x [T, *], spread over it."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.shape[0] // _SAMPLE))].clone()


def _nearest(x: torch.Tensor, forwards: list[Forward]) -> Forward | None:
    """Find the forward of the input x, None if none is near; on a GPU a single one is taken as it is.

    A backward in two parts repeats one forward twice.
    """
    if len(forwards) == 1 and x.device.type != "cpu":
        return forwards[0]  # comparing numbers would wait for the device
    state = _generator_state(x.device)
    # the relative L1 distance of each forward's sample to this one, in [0, 1]; non-finite values count as 0
    samples = (_sample(x), *(forward.sample for forward in forwards))
    ours, *others = (sample.double().nan_to_num(0.0, 0.0, 0.0) for sample in samples)
    theirs = torch.stack(others)
    largest = ours.abs().sum() + theirs.abs().sum(1)
    distances: list[float] = ((theirs - ours).abs().sum(1) / largest.clamp(min=1e-300)).tolist()

    def unlikeness(pair: tuple[Forward, float]) -> tuple[float, bool, bool, int]:
        forward, distance = pair
        return distance, not torch.equal(forward.generator, state), forward.is_done, -forward.number

    found, distance = min(zip(forwards, distances, strict=True), key=unlikeness)
    return None if distance > _MAX_DISTANCE else found


def _generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that a gate draws its noise from; empty where it cannot be read."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return torch.cuda.get_rng_state(device)
    return torch.empty(0, device="cpu")


def _compact(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return choices as int16, or as int32 from 2^15 experts on, detached."""
    dtype = torch.int16 if num_experts < 2**15 else torch.int32
    return topk_idx.detach().to(dtype)


class Repeat:
    """The tape of a gate while a forward is repeated: it returns the original's choices (gates/base_gate.py)."""

    def __init__(self, selected: torch.Tensor, is_fused: bool):
        self.is_fused = is_fused
        self._selected = selected

    def choose(self, pick: Any) -> torch.Tensor:
        return self._selected
