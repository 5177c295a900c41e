"""Auditor: recompute random rows of servers' answers, and name the servers that cheat.

Training alone does not show a server that saves work by answering with noise. An audit asks another replica, if there
is one, for the expert's weights and computes a few rows of the answer again.
    forward    answer of version v, then the weights; they must be of version v
    backward   the weights of version v, then the gradient, whose update must lead to version v + 1
Weights move on with every update, so an audit that meets another update says nothing: check() tries again, watch()
counts it. Rows are chosen after the answer, so a server cannot compute only those.
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

# Relative errors that an honest answer stays below, by compression, which rounds the rows on both ways.
TOLERANCES = MappingProxyType({"none": 1e-3, "bf16": 0.02, "int8": 0.05})


@dataclass(frozen=True)
class Finding:
    """The result of an audit that was passed."""

    uid: str
    endpoint: str  # of the server that answered
    num_rows: int  # that were recomputed
    error: float  # largest difference between answer and recomputation, relative to the largest number


class Auditor:
    """Audit answers: check() and check_backward() make calls of their own, watch() takes a share of the client's.

    The weights come from another replica than the one that answered, if there is one, and must be of the version that
    the answer names; otherwise check() and check_backward() try again, `attempts` times in all. With one replica, a
    server is only caught if its answers differ from its own weights. rows: how many are recomputed; tolerance: the
    relative error that is allowed, TOLERANCES[compression] by default. Gradients are not audited if the client
    compresses them, because the error that it feeds back is in them.
    """

    def __init__(
        self,
        client: Client,
        tolerance: float | None = None,
        rows: int = 2,
        attempts: int = 5,
        seed: int | None = None,
    ):
        if rows < 1:
            raise ValueError(f"rows must be at least 1, but got {rows}: an audit of none finds nothing")
        default = TOLERANCES[client.settings.compression]
        self.client, self.tolerance = client, default if tolerance is None else tolerance
        self.rows, self.attempts = rows, attempts
        self.caught: Counter[str] = Counter()  # how often each endpoint has cheated
        self.share = 0.0  # of the client's calls
        self._random = random.Random(seed)

    def watch(self, share: float) -> "Auditor":
        """Audit this share of the client's own calls from now on, forward and backward, within their deadlines.

        A call that is caught raises Cheated, which layers that tolerate failures take for one. client.counts has
        "audits" and "audits without a result": the weights had moved on, or did not come in time.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must lie between 0 and 1, but got {share}")
        self.share = share
        self.client.watcher = self if share else None
        return self

    def check(self, handle: Handle, *inputs: torch.Tensor, timeout: float = 10.0) -> Finding:
        """Audit a forward -> its Finding; Cheated if the answer is wrong, RemoteError if no audit was possible."""
        for _ in range(self.attempts):
            outcome = loop.run(self.client.forward(handle, inputs, timeout), timeout + 1)
            state = loop.run(self._state(handle, outcome.endpoint, timeout), timeout + 1)
            if state.number("version", -2) == outcome.version:  # -2: a state that names none is of no version
                return self._compare(handle, inputs, outcome, state)
        raise RemoteError(f"{handle.uid} changed between answer and weights {self.attempts} times: no audit")

    def check_backward(
        self, handle: Handle, inputs: Sequence[torch.Tensor], grad: torch.Tensor, timeout: float = 10.0
    ) -> Finding:
        """Audit the gradients of inputs as check() does a forward; the expert makes a step at each attempt."""
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
        """Audit this answer with probability `share`; Cheated if it is wrong."""
        if self._random.random() < self.share:
            state = await self._state_in_time(handle, outcome.endpoint, timeout)
            self.judge(handle, inputs, outcome, state)

    async def before_backward(self, handle: Handle, timeout: float) -> Message | None:
        """Return the weights to recompute a gradient with; None if this one is not audited, or they do not come."""
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
        """Raise Cheated if the weights in state give another output or, with grad, other gradients of inputs."""
        name = "audits without a result"
        try:
            if state is not None and state.number("version", -2) + (grad is not None) == outcome.version:
                self._compare(handle, inputs, outcome, state, grad)
                name = "audits"
        except _NoAudit:
            pass  # unusable weights are no fault of the server that answered: the call goes on
        except Cheated:
            name = "audits"
            raise
        finally:
            self.client.counts[name] += 1

    # ---------------------------------------------------------------- the weights

    async def _state(self, handle: Handle, answered: str | None, timeout: float) -> Message:
        """Fetch the expert's state, from another replica than `answered` (None: the leader) if there is one."""
        endpoints = handle.record.endpoints if handle.record else ()
        leader = endpoints[0] if endpoints else None
        others = [e for e in endpoints if e != (answered or leader)]
        where = self._random.choice(others) if others else answered or leader
        if where is None:
            raise RemoteError(f"nobody hosts {handle.uid}: no audit")
        return await self.client.state(handle, where, timeout)

    async def _state_in_time(self, handle: Handle, answered: str | None, timeout: float) -> Message | None:
        """Fetch the expert's state; None if it did not come in time: no fault of the server that answered."""
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
        # 1. the truth: these rows by the weights in state, on the CPU, where the answers are
        num_rows = inputs[0].shape[0]
        chosen = self._random.sample(range(num_rows), min(self.rows, num_rows))
        rows = [x.detach()[chosen].cpu() for x in inputs]
        try:
            if grad is None:
                with torch.no_grad():
                    truth: Sequence[torch.Tensor] = [_compute(handle, state, rows)]
            else:
                wanted = [x.requires_grad_() for x in rows if x.is_floating_point()]
                with torch.enable_grad():
                    y = _compute(handle, state, rows)
                    truth = torch.autograd.grad(y, wanted, grad[chosen].cpu(), materialize_grads=True)
        except Exception as error:
            text = f"the weights that its servers sent cannot be used: {str(error)[:500]}"
            raise _NoAudit(f"no audit of {handle.uid}: {text}") from None
        # 2. the largest difference, relative to the largest true number (at least 1e-30, for rows of zeros).
        # A NaN fails the comparison below, as it must.
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
    """Compute the expert's output by the weights of a state; ValueError if they are of another kind of expert."""
    weights = {n.removeprefix("weight/"): x for n, x in state.tensors.items() if n.startswith("weight/")}
    # The server chooses class and width: compare shapes on the meta device before the memory of a module is taken.
    expert_class = find_expert_class(handle.expert_class)
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in expert_class.make(handle.hidden_dim).named_parameters()}
    if wanted != {name: x.shape for name, x in weights.items()}:
        raise ValueError(f"they are not those of {handle.expert_class} with hidden_dim={handle.hidden_dim}")
    with torch.device("cpu"):
        module = expert_class.make(handle.hidden_dim)
    buffers = {n.removeprefix("buffer/"): x for n, x in state.tensors.items() if n.startswith("buffer/")}
    module.load_state_dict(weights | buffers, strict=False)
    return expert_class.compute(module, inputs)
