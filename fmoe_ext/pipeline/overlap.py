"""Exchange one microbatch's rows while another's attention and experts compute: OVERLAP_F_B of DualPipe's schedules.

The forward of one microbatch and the backward of another run by turns in two threads, one at a time. A thread that
would wait for an exchange of expert parallelism lets the other run until that one waits:

    backward   start exchange a |                           | wait for a, compute, start c |
    forward                     | compute, start exchange b |                              | wait for b, compute, ...

Turns change at fixed places of the computation and not when a message happens to come, so that all ranks call their
collectives in one order. The backward begins: a block ends in its experts, so that a backward has a message under way
before it has anything to compute, and the forward's last message travels while the backward computes its last.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import BACKWARD_INPUT, FORWARD, FULL_BACKWARD, OVERLAP_F_B

from fmoe_ext.ep.exchange import while_waiting
from fmoe_ext.ops import batch_invariant, is_batch_invariant
from fmoe_ext.recompute import current_thread, works_for


class Overlap:
    """Functions that a schedule of torch calls for its actions, so that those of an OVERLAP_F_B run by turns.

    train.Pipeline makes it for dualpipe_v, but not with FSDP.
    schedule: one that takes custom functions. stages: those of this rank.
    loss_fn(output, target) -> a microbatch's loss.
    """

    def __init__(
        self,
        schedule: Any,
        stages: Iterable[PipelineStage],
        loss_fn: Callable[[Any, Any], Tensor],
        device: torch.device,
    ):
        self._schedule, self._loss_fn = schedule, loss_fn
        self._stages = {stage.stage_index: stage for stage in stages}
        self._losses: dict[int, Tensor] = {}  # of microbatches whose backward has not come
        # All kinds that read or write _losses. BACKWARD_INPUT is the first part of a backward in two; the second,
        # BACKWARD_WEIGHT, stays torch's.
        schedule.register_custom_function(FORWARD, self._forward)
        schedule.register_custom_function(FULL_BACKWARD, self._backward)
        schedule.register_custom_function(BACKWARD_INPUT, self._backward)

        def both(action: Any, context: Any) -> None:
            forward, backward = action.sub_actions
            by_turns(
                lambda: self._backward(backward, context), lambda: self._forward(forward, context), device
            )

        schedule.register_custom_function(OVERLAP_F_B, both)

    def _forward(self, action: Any, context: Any) -> None:
        """Run the forward of a microbatch as torch's schedule does: receive, compute, pass on inside this rank.

        What that does for DDP, FSDP and its list of losses is left out, here and in _backward().
        """
        index, number = action.stage_index, action.microbatch_index
        stage = self._stages[index]
        _wait_all(self._schedule.fwd_recv_ops.pop((index, number), ()))
        given = context.arg_mbs[number], context.kwarg_mbs[number]
        output = stage.forward_one_chunk(number, *given, save_forward_output=False)
        if stage.is_last:
            self._losses[number] = self._loss_fn(output, context.target_mbs[number])
        elif index + 1 in self._stages:
            self._stages[index + 1].set_local_fwd_input(output, number)

    def _backward(self, action: Any, context: Any) -> None:
        """Run the backward of a microbatch, or its first part, as torch's schedule does."""
        index, number = action.stage_index, action.microbatch_index
        stage = self._stages[index]
        _wait_all(self._schedule.bwd_recv_ops.pop((index, number), ()))
        loss = self._losses.pop(number) if stage.is_last else None
        stage.backward_one_chunk(number, loss, full_backward=action.computation_type == FULL_BACKWARD)
        if index - 1 in self._stages:
            self._stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(number), number)


def _wait_all(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()


def by_turns(first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
    """Run both to their ends, each while the other waits for an exchange; first begins, second has this thread.

    Random numbers are those of first() followed by second(), if first() leaves the generators as they were, as a
    backward does that computes checkpointed activations again. Raises what either raises, first()'s if both do.
    """
    turns = _Turns(device)
    # the new thread works for this one: what layers keep for each thread (losses, tapes) is this one's there too
    context = contextvars.copy_context()
    context.run(works_for.set, current_thread())
    thread = threading.Thread(target=context.run, args=(turns.run, 0, first), daemon=True)
    try:
        thread.start()
        turns.run(1, second)
        thread.join()
    finally:  # Ctrl-C may come at any line above: the other must neither wait for ever nor run beside the caller
        turns.end(1)
        if thread.is_alive():
            thread.join()
    _set_random_state(device, turns.state_of_second)
    for error in turns.errors:
        if error is not None:
            raise error


class _Turns:
    """Whose turn it is of two threads, 0 and 1.

    Each has the caller's stream, autocast, default device and batch invariance, and random numbers as if it ran alone.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._changed = threading.Condition()  # guards _turn and _ended
        self._turn = 0
        self._begin = _random_state(device)  # of both, if first() leaves the generators alone (by_turns)
        self._ended = [False, False]
        self._mode = batch_invariant if is_batch_invariant() else contextlib.nullcontext  # of a thread
        default = torch.get_default_device()
        self._default_device = contextlib.nullcontext() if default.type == "cpu" else default
        is_cached = torch.is_autocast_cache_enabled()
        self._autocasts = [
            torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=is_cached)
            for kind in {"cpu", device.type}
            if torch.is_autocast_enabled(kind)
        ]
        self.errors: list[BaseException | None] = [None, None]

    def run(self, me: int, fn: Callable[[], None]) -> None:
        """Call fn() in the turns of `me`."""
        try:
            self._await(me)  # in here: Ctrl-C in the wait is an error of this thread's like any other
            # torch's generators belong to all threads, modes and streams to each: set them for this one
            _set_random_state(self._device, self._begin)
            # The new thread begins without autocast, and ends with it: an exit would empty all threads' cache of casts.
            if me == 0:
                for autocast in self._autocasts:
                    autocast.__enter__()
            with (
                torch.autograd.set_multithreading_enabled(False),  # backward stays in this thread
                torch.cuda.stream(self._stream),
                self._default_device,
                self._mode(),
                while_waiting(lambda: self._hand_over(me)),
            ):
                fn()
        except BaseException as error:  # raised by by_turns(), when the other has ended too
            self.errors[me] = error
        if me == 1:  # the generators go on from here, as after first() and then second()
            self.state_of_second = _random_state(self._device)
        self.end(me)

    def end(self, me: int) -> None:
        """Leave all turns to the other from now on."""
        with self._changed:
            self._ended[me] = True
            self._changed.notify_all()

    def _hand_over(self, me: int) -> None:
        """Let the other run until it hands over or ends; called by ep.exchange before it waits."""
        if self._ended[1 - me]:
            return
        state = _random_state(self._device)
        with self._changed:
            self._turn = 1 - me
            self._changed.notify_all()
        self._await(me)
        _set_random_state(self._device, state)

    def _await(self, me: int) -> None:
        with self._changed:
            # Ctrl-C may end the other outside of its turn, so that it never gives this one back
            self._changed.wait_for(lambda: self._turn == me or self._ended[1 - me])


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    on_host, on_device = state
    torch.set_rng_state(on_host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
