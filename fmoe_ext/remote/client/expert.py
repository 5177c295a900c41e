"""Make remote experts usable as modules: RemoteExpert, RemoteExperts, LiveGate, and Directory, which finds them.

A Batch is the step of autograd below RemoteExpert, RemoteExperts and the layers in moe.py: its forward calls all
experts side by side and its backward sends each its gradient. So a layer waits for its slowest expert, not for the sum
of all. Calls run on the loop of remote/loop.py; the thread that trains waits for them.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fmoe_ext.gates import BaseGate
from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Handle, Outcome, Settings
from fmoe_ext.remote.discovery import Discovery, ExpertRecord, is_uid
from fmoe_ext.remote.errors import CallTimeout, Refused, RemoteError
from fmoe_ext.remote.schema import Schema
from fmoe_ext.remote.security import Credentials

# seconds beyond a deadline that a thread waits for the loop, which keeps deadlines itself unless too busy
MARGIN = 1.0


@dataclass(frozen=True)
class Call:
    """A call of one expert."""

    client: Client  # that makes it, with its credentials and timeouts
    handle: Handle
    inputs: tuple[torch.Tensor, ...]  # as its schema says, each with the batch in dimension 0


@dataclass
class Batch:
    """Calls of several experts, side by side, as one step of autograd."""

    calls: Sequence[Call]
    # a call that fails has output None and gradient zero, instead of raising RemoteError or SchemaError
    tolerant: bool = False
    grace: float | None = None  # seconds for the other calls after is_enough(); None: until their deadlines

    def __post_init__(self) -> None:
        # kept for the backward: a client may get others until then
        self.settings = [call.client.settings for call in self.calls]
        self.failed: list[Exception | None] = [None] * len(self.calls)  # why a call has no output
        self.versions = [0] * len(self.calls)  # of the weights that answered; sent along with the gradient
        self.grad_failed: list[Exception | None] = [None] * len(self.calls)  # why a call's gradient was lost

    def is_enough(self, succeeded: Set[int], is_forward: bool) -> bool:
        """True if enough calls succeeded, so that the others get `grace` more seconds; subclasses say when."""
        return False

    def run(self) -> list[torch.Tensor | None]:
        """Return the output of each call, differentiable; None for one that failed."""
        flat = [x for call in self.calls for x in call.inputs]
        # an input that always asks for a gradient: backward must run, and train the experts, even if no other does
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        outputs = list(_Calls.apply(self, anchor, *flat))
        return [y if error is None else None for y, error in zip(outputs, self.failed, strict=True)]

    def refuse_misfits(
        self, outputs: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return the outputs, with None for those whose dtype or row shape differs from their tensor in `wanted`."""
        kept: list[torch.Tensor | None] = []
        for n, (y, like) in enumerate(zip(outputs, wanted, strict=True)):
            fits = y is None or (y.dtype, y.shape[1:]) == (like.dtype, like.shape[1:])
            if y is not None and not fits:
                self.failed[n] = Refused(
                    f"{self.calls[n].handle.uid} returned rows of {y.dtype} {list(y.shape[1:])}, but "
                    f"{like.dtype} {list(like.shape[1:])} were expected"
                )
            kept.append(y if fits else None)
        return kept

    def _run_all(
        self,
        calls: Sequence[Coroutine[Any, Any, Outcome]],
        timeout: float,
        errors: list[Exception | None],
        is_enough: Callable[[Set[int]], bool],
    ) -> list[Outcome | None]:
        """Run all calls -> their outcomes, within MARGIN of the deadline; `errors` gets why one is None."""

        async def gather() -> list[Any]:
            """Return each call's result or exception; `grace` seconds after is_enough() the others time out."""
            if (grace := self.grace) is None:
                return await asyncio.gather(*calls, return_exceptions=True)
            tasks = [asyncio.ensure_future(call) for call in calls]
            waiting, left, begin = set(tasks), None, 0.0
            try:
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                    ended = [n for n, t in enumerate(tasks) if t.done() and not t.cancelled()]
                    now = time.monotonic()
                    # grace counts from the first time that it was enough
                    if not begin and is_enough({n for n in ended if not tasks[n].exception()}):
                        begin = now
                    left = None if not begin else max(0.0, begin + grace - now)
                    if left == 0.0:
                        break
            finally:
                for task in waiting:
                    task.cancel()
            late = CallTimeout(f"enough experts answered, and this one took {grace:.3g} s longer")
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return [late if task in waiting else result for task, result in zip(tasks, results, strict=True)]

        results: Sequence[Any]  # an Outcome or an exception each
        try:
            results = loop.run(gather(), timeout + MARGIN)
        except TimeoutError:  # each call has its own deadline, but this process was too busy to keep them
            late = CallTimeout(
                f"calls had not ended {MARGIN:.3g} s after their deadline of {timeout:.3g} s, and all were given up"
            )
            results = [late] * len(calls)
        for n, result in enumerate(results):
            # ValueError: SchemaError, inputs that this expert does not take
            if isinstance(result, (RemoteError, ValueError)) and self.tolerant:
                errors[n] = result
            elif isinstance(result, BaseException):
                raise result
        return [None if error is not None else r for r, error in zip(results, errors, strict=True)]

    def forward(self, inputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the output of each call; an empty tensor for one that failed, because autograd needs some output."""
        timeouts = [settings.forward_timeout for settings in self.settings]
        calls = [
            c.client.forward(c.handle, given, timeout)
            for c, given, timeout in zip(self.calls, inputs, timeouts, strict=True)
        ]
        longest = max(timeouts, default=0.0)
        outcomes = self._run_all(calls, longest, self.failed, lambda done: self.is_enough(done, True))
        self.versions = [0 if outcome is None else outcome.version for outcome in outcomes]
        empty = inputs[0][0].new_empty(0) if inputs else torch.empty(0, device="cpu")
        return [empty.clone() if outcome is None else outcome.tensors[0] for outcome in outcomes]

    def backward(
        self, inputs: Sequence[Sequence[torch.Tensor]], grads: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, ...] | None]:
        """Return the gradients of the floating inputs of each call; None for a call that failed, here or in forward."""
        timeouts = [settings.backward_timeout for settings in self.settings]
        # a call without an output gets no gradient; n counts all calls, place in `asked` only the others
        asked = [n for n, error in enumerate(self.failed) if error is None]
        calls = [
            self.calls[n].client.backward(
                self.calls[n].handle, inputs[n], grads[n], self.versions[n], timeouts[n]
            )
            for n in asked
        ]
        errors: list[Exception | None] = [None] * len(asked)
        longest = max(timeouts, default=0.0)
        outcomes = self._run_all(
            calls, longest, errors, lambda done: self.is_enough({asked[n] for n in done}, False)
        )
        found: list[tuple[torch.Tensor, ...] | None] = [None] * len(self.calls)
        for n, outcome, error in zip(asked, outcomes, errors, strict=True):
            self.grad_failed[n] = error
            self.calls[n].client.counts["gradients lost"] += error is not None
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
            # one a floating input; none if the call failed: autograd takes None as 0
            queue = iter(tensors or ())
            d_flat += [next(queue, None) if x.is_floating_point() else None for x in given]
        flat = [x for given in inputs for x in given]
        moved = [None if d is None else d.to(x.device) for d, x in zip(d_flat, flat, strict=True)]
        return None, None, *moved


def _unflatten(batch: Batch, flat: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    queue = iter(flat)
    return [tuple(next(queue) for _ in call.inputs) for call in batch.calls]


class RemoteExpert(nn.Module):
    """An expert on another machine: forward and backward go there, and its weights are trained there.

    uid: its name. where: "host:port"; several of them for replicas, the one that takes gradients first; a record of
    discovery; or None to ask the client's discovery. client: shared by many experts; its Settings have the deadlines.
    Raises SchemaError for wrong inputs before they are sent, RemoteError (CallTimeout, ExpertGone, Busy, Refused,
    NoLeader) if the call fails. The module has no parameters.
    """

    def __init__(
        self, uid: str, where: str | Sequence[str] | ExpertRecord | None = None, client: Client | None = None
    ):
        super().__init__()
        self.client = client or Client()
        self.handle = self.client.handle(uid, where)

    @property
    def uid(self) -> str:
        """The expert's name."""
        return self.handle.uid

    def forward(
        self, *inputs: torch.Tensor, **keywords: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Send inputs, as the expert's schema says with the batch in dimension 0 -> the output, one row for each row.

        An expert with several outputs returns a tuple.
        """
        # the schema is fetched before the first call, and then needed only to order keywords
        if keywords or self.handle.schema is None or self.handle.schema.keywords:
            inputs = self.schema().arrange(inputs, keywords, self.uid)
        (y,) = Batch([Call(self.client, self.handle, inputs)]).run()
        assert y is not None and self.handle.schema is not None
        return self.handle.schema.split(y)

    def schema(self) -> Schema:
        """Return the expert's inputs and outputs, which are fetched once."""
        timeout = self.client.settings.info_timeout
        return loop.run(self.client.learn(self.handle, timeout), timeout + MARGIN)

    def extra_repr(self) -> str:
        where = self.handle.record.endpoints if self.handle.record else "by discovery"
        return f"{self.uid!r}, {where}"


class RemoteExperts(nn.Module):
    """Local modules and RemoteExperts as layer.experts of an FMoE(expert=None, num_expert=len(experts), ...).

    forward(rows [R, D] sorted by expert, tokens_per_expert [E]) -> [R, D]. Each remote expert with rows is called once,
    all side by side; local experts compute after the answers. A remote expert that does not answer in time
    gives rows of zeros, gets no gradient, and counts as gone for a while (is_gone); LiveGate sends it no tokens then.
    client: calls all of them; None: each RemoteExpert's own client does, with its credentials and settings.
    """

    def __init__(self, experts: Sequence[nn.Module], client: Client | None = None):
        super().__init__()
        self.members = nn.ModuleList(experts)
        self.client = client
        self.last_failed: dict[str, str] = {}  # uid: why, in the last forward that called remote experts

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        # 1. the rows of each expert; calls for the remote ones that have some
        counts = torch.as_tensor(tokens_per_expert, device="cpu").tolist()
        # [tokens, D] an expert; rows of dropped choices lie behind all
        parts = rows[: sum(counts)].split(counts)
        calls = {
            n: Call(self.client or expert.client, expert.handle, (parts[n],))
            for n, expert in enumerate(self.members)
            if isinstance(expert, RemoteExpert) and parts[n].shape[0]
        }
        # 2. all calls at once; None for one that failed, or that returned other rows than its input has
        outputs: dict[int, torch.Tensor | None] = {}
        if calls:
            batch = Batch(list(calls.values()), tolerant=True)
            fitting = batch.refuse_misfits(batch.run(), [call.inputs[0] for call in batch.calls])
            outputs |= zip(calls, fitting, strict=True)
            failures = zip(batch.calls, batch.failed, strict=True)
            self.last_failed = {call.handle.uid: str(error) for call, error in failures if error is not None}
        # 3. local experts, and all outputs in the order of the experts
        for n, expert in enumerate(self.members):
            if not isinstance(expert, RemoteExpert):
                outputs[n] = expert(parts[n])
        results = [outputs.get(n) for n in range(len(parts))]
        return torch.cat(
            [torch.zeros_like(x) if y is None else y for x, y in zip(parts, results, strict=True)]
        )

    def is_gone(self) -> torch.Tensor:
        """Return [E] bool: True for remote experts that did not answer, or were caught, lately (GONE_FOR)."""
        return torch.tensor(
            [isinstance(expert, RemoteExpert) and expert.handle.is_gone for expert in self.members],
            device="cpu",
        )


class LiveGate(nn.Module):
    """Wrap a gate so that no token goes to an expert that is gone: such choices become -1 (dropped).

    With FMoE(renormalize=True) the token's other experts take over their weight.
    """

    def __init__(self, gate: BaseGate, experts: RemoteExperts):
        super().__init__()
        self.gate = gate
        self._experts = (experts,)  # not a submodule: the layer has them already

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = self.gate(inp)
        gone = self._experts[0].is_gone().to(topk_idx.device)
        dropped = gone[topk_idx.clamp(min=0)] & (topk_idx >= 0)
        return topk_idx.masked_fill(dropped, -1), topk_weights

    def get_loss(self, clear: bool = True) -> torch.Tensor | None:
        """Return the wrapped gate's loss."""
        loss: torch.Tensor | None = self.gate.get_loss(clear)
        return loss

    @property
    def has_loss(self) -> bool:
        """True if the wrapped gate has a loss."""
        return bool(self.gate.has_loss)


class Directory:
    """Find and declare experts through any Discovery, from programs without a loop; timeouts are seconds."""

    def __init__(
        self, discovery: Discovery, settings: Settings | None = None, credentials: Credentials | None = None
    ):
        self.discovery = discovery
        self.client = Client(discovery, settings, credentials)

    def get_experts(self, uids: Sequence[str], timeout: float = 5.0) -> list[RemoteExpert | None]:
        """Return a RemoteExpert for each uid, None where there is none; DiscoveryError without an answer in time."""
        names = [uid for uid in dict.fromkeys(uids) if is_uid(uid)]
        records = loop.run(self.discovery.get(names, timeout=timeout), timeout + MARGIN)
        found = {record.uid: record for record in records if record is not None}
        return [RemoteExpert(uid, found[uid], self.client) if uid in found else None for uid in uids]

    def declare_experts(
        self, uids: Sequence[str], endpoint: str, ttl: float = 30.0, timeout: float = 5.0
    ) -> frozenset[str]:
        """Claim uids for an endpoint for ttl seconds -> those that it owns now."""
        return loop.run(self.discovery.declare(list(uids), endpoint, ttl, timeout=timeout), timeout + MARGIN)

    def shutdown(self, timeout: float = 5.0) -> None:
        """Close all connections; what was declared stays until it expires."""
        loop.run(self.client.close(), timeout)
        loop.run(self.discovery.close(), timeout)
