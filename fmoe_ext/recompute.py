"""Matches a forward that activation checkpointing repeats in the backward with the original, whose routing it reuses.

A forward that runs inside a backward is a repetition: torch.utils.checkpoint (reentrant or not), Megatron-core,
DeepSpeed and Transformers, which calls the former, all do it so. torch.utils.module_tracker.ModuleTracker says so in
public. Of several forwards of a layer whose backward is still to come the repetition is the one whose input is nearest;
of those with the same input, the one that found PyTorch's generator as it is now (a checkpoint restores it); of those,
the last, for autograd goes backwards. On the CPU a backward repeats forwards on the thread that called it, which asks
its own forwards first; those of a GPU are repeated on a thread of autograd, which asks those of all. docs/design.md
says why no public interface gives an exact match.
A selective checkpoint compares the operators of both forwards, so that there a repetition computes everything again.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.module_tracker import ModuleTracker

from fmoe_ext.ops.batch_invariant import is_batch_invariant
from fmoe_ext.tokens import Batch, Nest, leaves_of

_SAMPLE = 64  # numbers of the input that tell the forwards of a layer apart
_MAX_DISTANCE = 0.4  # largest relative L1 distance of samples of the same input; two random inputs have 0.7
_MAX_WITHOUT_GRAPH = 64  # forwards under no_grad of which each layer keeps the choices


works_for: ContextVar[int] = ContextVar("the thread whose work this one does", default=0)


def current_thread() -> int:
    """Return the number of the thread whose forwards these are."""
    return works_for.get() or threading.get_ident()


def is_repeated() -> bool:
    """Return whether this forward repeats an earlier one."""
    return not torch.compiler.is_compiling() and bool(_tracker().is_bw)


@functools.cache
def _tracker() -> ModuleTracker:
    return ModuleTracker()


def can_be_repeated(without_graph: bool) -> bool:
    """Return whether activation checkpointing may repeat the forward that begins now.

    With a graph: it runs under hooks for saved tensors, by which a checkpoint without reentrance drops and recomputes
    them. Without a graph, as reentrant checkpoints and their like run a forward: without_graph.
    """
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return without_graph
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("only asks whether there are hooks"):
            return False
    except RuntimeError:
        return True


@dataclass(eq=False)
class Forward:
    """Decisions of one forward of a layer, for its repetition."""

    num_tokens: int
    sample: torch.Tensor  # numbers of its input, to know it by
    generator: torch.Tensor  # the state of PyTorch's generator, to know it by
    batch: Batch
    number: int = 0  # of the layer's forwards
    selected: torch.Tensor | None = None  # [T, K] of a small dtype: choices before any drop; None: not yet
    kept: torch.Tensor | None = None  # [T, K]: those that were left
    is_fused: bool = True  # the gate chose and weighed in one operator, which keeps other tensors than two
    microbatch: int | None = None  # its number where losses span several (gates.accumulation)
    way: Any = None  # the route of its tokens between ranks
    is_done: bool = False  # a repetition has found it
    messages: list[torch.Tensor] = field(default_factory=list)  # results of exchanges between ranks, in order
    num_replayed: int = 0  # how many of these the repetition has used
    # groups of ranks of which one had no tokens, and so cannot match its forwards
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
        self.kept = _compact(kept, num_experts)
        self.selected = self.kept if selected is None or selected is kept else _compact(selected, num_experts)
        self.is_fused = is_fused


class Forwards:
    """The forwards of one layer that may be repeated.

    Those with a graph live as long as it does; those without, as a reentrant checkpoint runs them, until their thread's
    first forward after their repetition (a checkpoint in a checkpoint repeats them twice), at most _MAX_WITHOUT_GRAPH
    of a thread. Copies of a layer begin with none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._with_graph: list[weakref.ref[Forward]] = []
        self._without: list[Forward] = []
        self._numbers = itertools.count(1)

    def __reduce__(self) -> tuple[type[Forwards], tuple[()]]:
        return Forwards, ()

    def begin(self, first: torch.Tensor, batch: Batch) -> Forward:
        """Begin a forward, not yet kept. first [T, *]: the first tensor of its input."""
        state = _generator_state(first.device)
        return Forward(first.shape[0], _sample(first), state, batch, next(self._numbers))

    def find(self, first: torch.Tensor) -> Forward | None:
        """Find the forward that this one repeats; None if it is not among those that were kept."""
        with self._lock:
            alive = [forward for forward in (ref() for ref in self._with_graph) if forward is not None]
            same = [f for f in (*alive, *self._without) if f.num_tokens == first.shape[0]]
        thread = current_thread()
        own = [forward for forward in same if forward.thread == thread]
        found = _nearest(first, own) if own else None
        if found is None and len(own) < len(same):
            found = _nearest(first, same)
        if found is not None:
            found.is_done, found.num_replayed = True, 0
        return found

    def keep(self, forward: Forward, out: Nest, training: bool) -> None:
        """Keep a forward as long as its output can be asked for gradients."""
        if self._without:
            with self._lock:
                self._without = [f for f in self._without if not f.is_done or f.thread != forward.thread]
        if not torch.is_grad_enabled():
            # or its padding would not be known when it is repeated
            if training or forward.batch.rows is not None:
                with self._lock:
                    own = [f for f in self._without if f.thread == forward.thread]
                    if len(own) >= _MAX_WITHOUT_GRAPH:
                        self._without.remove(own[0])
                    self._without.append(forward)
            return
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
    """Find the forward of the input x, None if there is none; a backward in two parts repeats one forward twice."""
    if len(forwards) == 1 and x.device.type != "cpu":
        return forwards[0]  # to look at numbers would wait for the device
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
    dtype = torch.int16 if num_experts < 2**15 else torch.int32
    return topk_idx.detach().to(dtype)


class Repeat:
    """Tape of a gate while a forward is repeated."""

    def __init__(self, selected: torch.Tensor, is_fused: bool):
        self.is_fused = is_fused
        self._selected = selected

    def choose(self, pick: Any) -> torch.Tensor:
        return self._selected
