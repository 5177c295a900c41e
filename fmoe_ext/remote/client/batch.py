"""Calls to many experts as one step of autograd: all forwards at once, all backwards at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Handle, Outcome
from fmoe_ext.remote.errors import CallTimeout, RemoteError

MARGIN = 1.0  # seconds that the loop may take beyond a deadline before its caller stops waiting for it


@dataclass(frozen=True)
class Call:
    """An expert and its inputs."""

    handle: Handle
    inputs: tuple[torch.Tensor, ...]


@dataclass
class Batch:
    """Calls that go together. failed[n]: why call n has no output, None if it has one.

    tolerant: a call that fails gives no output (None), or zero as gradient; otherwise it raises RemoteError.
    """

    client: Client
    calls: Sequence[Call]
    forward_timeout: float
    backward_timeout: float
    tolerant: bool = False

    def __post_init__(self) -> None:
        self.failed: list[Exception | None] = [None] * len(self.calls)
        self.versions = [0] * len(self.calls)
        self.grad_failed: list[Exception | None] = [None] * len(self.calls)

    def run(self) -> list[torch.Tensor | None]:
        """The outputs, differentiable."""
        flat = [x for call in self.calls for x in call.inputs]
        anchor = torch.empty(
            0, requires_grad=True
        )  # so that experts learn even if no input asks for a gradient
        outputs = list(_Calls.apply(self, anchor, *flat))
        return [y if error is None else None for y, error in zip(outputs, self.failed, strict=True)]

    def _settle(self, results: Sequence[Any], errors: list[Exception | None]) -> list[Outcome | None]:
        for n, result in enumerate(results):
            if isinstance(result, (RemoteError, ValueError)) and self.tolerant:
                errors[n] = result
            elif isinstance(result, BaseException):
                raise result
        return [None if error is not None else r for r, error in zip(results, errors, strict=True)]

    def forward(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        client, timeout = self.client, self.forward_timeout
        calls = [
            client.forward(call.handle, given, timeout)
            for call, given in zip(self.calls, inputs, strict=True)
        ]
        outcomes = self._settle(_run_all(calls, timeout), self.failed)
        self.versions = [0 if outcome is None else outcome.version for outcome in outcomes]
        empty = inputs[0][0].new_empty(0) if inputs else torch.empty(0)
        return [empty.clone() if outcome is None else outcome.tensors[0] for outcome in outcomes]

    def backward(
        self, inputs: Sequence[Sequence[torch.Tensor]], grads: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, ...] | None]:
        """The gradients of the floating inputs of each call; None where there are none."""
        asked = [n for n, error in enumerate(self.failed) if error is None]
        timeout = self.backward_timeout
        calls = [
            self.client.backward(self.calls[n].handle, inputs[n], grads[n], self.versions[n], timeout)
            for n in asked
        ]
        errors: list[Exception | None] = [None] * len(asked)
        outcomes = self._settle(_run_all(calls, timeout), errors)
        found: list[tuple[torch.Tensor, ...] | None] = [None] * len(self.calls)
        for n, outcome, error in zip(asked, outcomes, errors, strict=True):
            self.grad_failed[n] = error
            self.client.counts["gradients lost"] += error is not None
            found[n] = None if outcome is None else outcome.tensors
        return found


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: Batch, anchor: torch.Tensor, *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.batch = batch
        ctx.save_for_backward(*flat)
        outputs = tuple(batch.forward(_unflatten(batch, [x.detach() for x in flat])))
        return tuple(y.to(x[0].device) for y, x in zip(outputs, _unflatten(batch, flat), strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = _unflatten(ctx.batch, ctx.saved_tensors)
        found = ctx.batch.backward(inputs, grads)
        d_flat: list[torch.Tensor | None] = []
        for given, tensors in zip(inputs, found, strict=True):
            queue = iter(tensors or ())
            d_flat += [next(queue, None) if x.is_floating_point() else None for x in given]
        flat = [x for given in inputs for x in given]
        moved = [None if d is None else d.to(x.device) for d, x in zip(d_flat, flat, strict=True)]
        return None, None, *moved


def _unflatten(batch: Batch, flat: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    queue = iter(flat)
    return [tuple(next(queue) for _ in call.inputs) for call in batch.calls]


def _run_all(calls: Sequence[Any], timeout: float) -> list[Any]:
    """What became of each call, exceptions included; at the latest MARGIN after the deadline."""
    try:
        return loop.run(_all(calls), timeout + MARGIN)
    except TimeoutError:  # this process is too busy to keep its own deadlines
        late = CallTimeout(f"no call had ended {MARGIN:.3g} s after its deadline of {timeout:.3g} s")
        return [late] * len(calls)


async def _all(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)
