"""Auditor: recomputes random rows of what servers answer, and names those that cheat.

A server that saves work by answering with noise is not seen by training alone. An audit asks another replica for the
weights and computes a few rows of the answer again. Both must be of one version: weights move on with every update,
so that an audit which meets an update says nothing and is tried again. Rows are chosen after the answer, so that a
server cannot compute only those.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Handle, Outcome
from fmoe_ext.remote.errors import Cheated, RemoteError
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.wire import Message

# Relative errors that an honest answer stays below, by compression: rows there and back are rounded.
TOLERANCES = MappingProxyType({"none": 1e-3, "bf16": 0.02, "int8": 0.05})


@dataclass(frozen=True)
class Finding:
    """The result of one audit."""

    uid: str
    endpoint: str  # of the server that answered
    num_rows: int  # that were recomputed
    error: float  # largest difference between answer and recomputation, relative to the largest number


class Auditor:
    """Recomputes some rows of answers with the expert's weights: check() and check_backward() calls of its own,
    watch() a share of the client's ordinary ones.

    The weights come from another replica than the one that answered where there is one, and must be those of the
    version that the answer names; otherwise the audit is tried again, attempts times. tolerance: of the relative
    error, above what float32 and the compression in use explain: TOLERANCES by default. Gradients of a client that
    compresses are not audited, because the error that it feeds back is in them. With one replica a
    server can only be caught in answering otherwise than its own weights do.
    """

    def __init__(
        self,
        client: Client,
        tolerance: float | None = None,
        rows: int = 2,
        attempts: int = 5,
        seed: int | None = None,
    ):
        default = TOLERANCES[client.settings.compression]
        self.client, self.tolerance = client, default if tolerance is None else tolerance
        self.rows, self.attempts = rows, attempts
        self.caught: Counter[str] = Counter()  # endpoint: how often
        self.share = 0.0
        self._random = random.Random(seed)

    def watch(self, share: float) -> "Auditor":
        """Audits this share of the client's ordinary calls from now on, forward and backward, within their deadlines.

        A call that is caught raises Cheated, and where failures are tolerated counts as one. client.counts has
        "audits" and "audits without a result": the weights had moved on, or did not come in time.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must lie between 0 and 1, but got {share}")
        self.share = share
        self.client.watcher = self if share else None
        return self

    def check(self, handle: Handle, *inputs: torch.Tensor, timeout: float = 10.0) -> Finding:
        """The finding; Cheated if the answer is not what the weights give, RemoteError if no audit was possible."""
        for _ in range(self.attempts):
            outcome = loop.run(self.client.forward(handle, inputs, timeout), timeout + 1)
            state = loop.run(self._state(handle, outcome.endpoint, timeout), timeout + 1)
            if state.number("version", -2) == outcome.version:
                return self._compare(handle, inputs, outcome, state)
        raise RemoteError(f"{handle.uid} changed between answer and weights {self.attempts} times: no audit")

    def check_backward(
        self, handle: Handle, inputs: Sequence[torch.Tensor], grad: torch.Tensor, timeout: float = 10.0
    ) -> Finding:
        """As check(), of the gradients of inputs; the expert makes a step at each attempt."""
        if (codec := self.client.settings.compression) != "none":
            raise ValueError(
                f"gradients are audited with compression='none' only, but the client has {codec!r}"
            )
        for _ in range(self.attempts):
            loop.run(self.client.learn(handle, timeout), timeout + 1)
            state = loop.run(self._state(handle, None, timeout), timeout + 1)
            call = self.client.backward(handle, inputs, grad, handle.version, timeout)
            outcome = loop.run(call, timeout + 1)
            if state.number("version", -2) + 1 == outcome.version:
                return self._compare(handle, inputs, outcome, state, grad)
        raise RemoteError(f"{handle.uid} changed before the gradient {self.attempts} times: no audit")

    # ---------------------------------------------------------------- what the client calls

    async def after_forward(
        self, handle: Handle, inputs: Sequence[torch.Tensor], outcome: Outcome, timeout: float
    ) -> None:
        """Raises Cheated if this answer is audited and wrong."""
        if self._random.random() < self.share:
            state = await self._state_in_time(handle, outcome.endpoint, timeout)
            self.judge(handle, inputs, outcome, state)

    async def before_backward(self, handle: Handle, timeout: float) -> Message | None:
        """The weights that a gradient will be recomputed with, or None if this one is not audited."""
        if self._random.random() >= self.share:
            return None
        state = await self._state_in_time(handle, None, timeout)
        if state is None:
            self.client.counts["audits without a result"] += 1
        return state

    def judge(
        self,
        handle: Handle,
        inputs: Sequence[torch.Tensor],
        outcome: Outcome,
        state: Message | None,
        grad: torch.Tensor | None = None,
    ) -> None:
        """Raises Cheated if the weights in state give another output or, with grad, other gradients of inputs."""
        name = "audits without a result"
        try:
            if state is not None and state.number("version", -2) + (grad is not None) == outcome.version:
                self._compare(handle, inputs, outcome, state, grad)
                name = "audits"
        except _NoAudit:
            pass  # weights that fit nothing end an ordinary call no more than weights that do not come
        except Cheated:
            name = "audits"
            raise
        finally:
            self.client.counts[name] += 1

    # ---------------------------------------------------------------- the weights

    async def _state(self, handle: Handle, answered: str | None, timeout: float) -> Message:
        """All of the expert, from another replica than the one that answered where there is one."""
        endpoints = handle.record.endpoints if handle.record else ()
        leader = endpoints[0] if endpoints else None
        others = [e for e in endpoints if e != (answered or leader)]
        where = self._random.choice(others) if others else answered or leader
        if where is None:
            raise RemoteError(f"nobody hosts {handle.uid}: no audit")
        return await self.client.state(handle, where, timeout)

    async def _state_in_time(self, handle: Handle, answered: str | None, timeout: float) -> Message | None:
        """The weights; None if they did not come in time, which the server that answered is not to blame for."""
        try:
            return await self._state(handle, answered, timeout) if timeout > 0 else None
        except RemoteError:
            return None

    # ---------------------------------------------------------------- the comparison

    def _compare(
        self,
        handle: Handle,
        inputs: Sequence[torch.Tensor],
        outcome: Outcome,
        state: Message,
        grad: torch.Tensor | None = None,
    ) -> Finding:
        """Recompute some rows of an output or, with grad, of the gradients of inputs; Cheated if they differ."""
        num_rows = inputs[0].shape[0]
        chosen = self._random.sample(range(num_rows), min(self.rows, num_rows))
        try:
            if grad is None:
                with torch.no_grad():
                    truth: Sequence[torch.Tensor] = [_compute(handle, state, [x[chosen] for x in inputs])]
            else:
                some = [x[chosen].requires_grad_(x.is_floating_point()) for x in inputs]
                wanted = [x for x in some if x.requires_grad]
                with torch.enable_grad():
                    y = _compute(handle, state, some)
                    truth = torch.autograd.grad(y, wanted, grad[chosen], materialize_grads=True)
        except Exception as error:
            text = f"the weights that its servers sent cannot be used: {str(error)[:500]}"
            raise _NoAudit(f"no audit of {handle.uid}: {text}") from None
        # a floor of the divisor, for rows of zeros; a NaN fails the comparison below, as it must
        errors = [
            ((got[chosen] - true).abs().max() / true.abs().max().clamp(min=1e-30)).item()
            if got[chosen].shape == true.shape
            else float("inf")
            for got, true in zip(outcome.tensors, truth, strict=True)
            if true.numel()
        ]
        largest = max(errors, default=0.0)
        if not all(e <= self.tolerance for e in errors):
            self.caught[outcome.endpoint] += 1
            raise Cheated(
                f"{outcome.endpoint} answered for {handle.uid} with an error of {largest:.3g}, {self.tolerance:g} is "
                f"allowed ({len(chosen)} of {num_rows} rows recomputed)"
            )
        return Finding(handle.uid, outcome.endpoint, len(chosen), largest)


class _NoAudit(RemoteError):
    """The weights that came cannot be computed with."""


def _compute(handle: Handle, state: Message, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The expert's output by the weights of a state; ValueError, before memory is taken, if they are of another one."""
    weights = {n.removeprefix("weight/"): x for n, x in state.tensors.items() if n.startswith("weight/")}
    expert_class = find_expert_class(handle.expert_class)
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in expert_class.make(handle.hidden_dim).named_parameters()}
    if wanted != {name: x.shape for name, x in weights.items()}:
        raise ValueError(f"they are not those of {handle.expert_class} with hidden_dim={handle.hidden_dim}")
    module = expert_class.make(handle.hidden_dim)
    buffers = {n.removeprefix("buffer/"): x for n, x in state.tensors.items() if n.startswith("buffer/")}
    module.load_state_dict(weights | buffers, strict=False)
    return expert_class.compute(module, inputs)
