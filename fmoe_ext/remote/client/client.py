"""Client: call experts within one deadline, with retries, hedging, and a new look-up of servers that are gone.

Batch (client/expert.py) calls forward() and backward() with tensors, and gets an Outcome or a RemoteError.
    forward   may go to any replica. If one fails, or is slower than usual, the next is called too (a *hedge*), and the
              first good answer counts. Good means: it is the leader's, or has every update that was acknowledged to
              this handle. A server that has left the members without knowing it answers with older weights.
    backward  goes to the leader alone, which orders updates. It is repeated under one request id, by which a later
              leader that has the update knows it (the last 1024: server/ledger.py), so that it counts once.
_repeat() tries again after failures that may pass, _hedge() asks several replicas in one attempt.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import Cached, Discovery, DiscoveryError, ExpertRecord, check_uid
from fmoe_ext.remote.schema import Schema, SchemaError, is_finite
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.wire import (
    MAX_MESSAGE_BYTES,
    ErrorFeedback,
    Limits,
    Message,
    check_codec,
    compress,
    decompress,
    encode,
)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between two attempts; each pause is twice the one before
GONE_FOR = 2.0  # seconds for which an expert that failed counts as gone (Handle.is_gone)
_REMEDIES: Mapping[type[Exception], str] = MappingProxyType(
    {
        errors.ExpertGone: "; start a server that hosts it, or wait longer for one: Settings(patience=...)",
        errors.CallTimeout: "; Settings(forward_timeout=..., backward_timeout=...) give it longer",
    }
)
# Failures that may pass: the call is tried again. Others (Refused, Cheated) would fail again.
PASSING = errors.ExpertGone, errors.NoLeader, errors.Busy, errors.CallTimeout, DiscoveryError
_UNTRUSTED = "; does Credentials(ca=...) hold who signed the server's certificate?"
_HEDGE_FACTOR = 3.0  # a call is slow when it takes this many times its expert's usual time
_HEDGE_FLOOR = 0.02  # seconds: three times a fast call is within what a busy machine adds


@dataclass(frozen=True)
class Settings:
    """Options of a client. Times are seconds."""

    compression: str = "none"  # of tensors in messages: one of wire.CODECS
    forward_timeout: float = 10.0
    backward_timeout: float = 10.0
    info_timeout: float = 10.0  # for an expert's schema, asked for once
    patience: float = 2.0  # for which a server is looked for if the expert has none
    # until a forward goes to a second replica too; None: three times the usual
    hedge_after: float | None = None
    attempt_share: float = 0.4  # of a backward's time that one silent server may use up
    max_state_bytes: int = 16 << 30  # of an expert's whole state, which a server sends in parts


@dataclass
class Handle:
    """One expert as its client knows it."""

    uid: str
    record: ExpertRecord | None  # None: discovery is asked
    given: ExpertRecord | None = None  # the user's endpoints, if discovery does not know the expert
    schema: Schema | None = None  # None: not asked for yet
    expert_class: str = ""
    hidden_dim: int = 0
    version: int = 0  # the largest in any answer
    # version of the newest update that was answered; a replica with less is out of date
    acknowledged: int = 0
    # of a forward, retries included: a moving average; None: not measured yet
    usual_seconds: float | None = None
    gone_until: float = 0.0  # time.monotonic() until which it counts as gone, after a failure
    feedback: ErrorFeedback = field(default_factory=lambda: ErrorFeedback("none"))

    @property
    def is_gone(self) -> bool:
        return time.monotonic() < self.gone_until


@dataclass(frozen=True)
class Outcome:
    """The answer of a server."""

    tensors: tuple[torch.Tensor, ...]  # the output, or the gradients of the floating inputs
    version: int  # of the weights that gave it; of a backward: that its update led to
    endpoint: str


class Client:
    """A client of any number of experts. counts: calls, hedges, retries and failures so far, by name."""

    def __init__(
        self,
        discovery: Discovery | None = None,
        settings: Settings | None = None,
        credentials: Credentials | None = None,
    ):
        self.discovery = None if discovery is None else Cached(discovery)
        self.settings = settings or Settings()
        check_codec(self.settings.compression)
        self.caller = Caller(credentials, Limits(MAX_MESSAGE_BYTES))
        self.counts: Counter[str] = Counter()
        self.watcher: Any = None  # an Auditor that recomputes a share of the answers (Auditor.watch)
        self.loss = ""  # sent with gradients, for the servers' status pages

    def handle(self, uid: str, where: str | Sequence[str] | ExpertRecord | None = None) -> Handle:
        """Make a handle for an expert at one endpoint, at several (replicas, the leader first), or by discovery."""
        if isinstance(where, str):
            where = (where,)
        if where is None and self.discovery is None:
            raise ValueError(f"nobody knows where {uid} is: give an endpoint, or the client a discovery")
        record = (
            where if isinstance(where, ExpertRecord) or where is None else ExpertRecord(uid, tuple(where))
        )
        given = None if isinstance(where, ExpertRecord) else record
        return Handle(check_uid(uid), record, given, feedback=ErrorFeedback(self.settings.compression))

    # ---------------------------------------------------------------- calls

    async def learn(self, handle: Handle, timeout: float) -> Schema:
        """Return the schema of an expert, which is asked for once."""
        if handle.schema is None:
            data = encode(Message({}, {protocol.UID: handle.uid}))
            answer, endpoint = await self._repeat(
                handle, timeout, lambda deadline: self._hedge(handle, protocol.INFO, data, deadline)
            )
            with _reading(endpoint, handle.uid):
                handle.hidden_dim = (
                    answer.number(protocol.HIDDEN_DIM) if protocol.HIDDEN_DIM in answer.meta else 0
                )
                handle.expert_class = answer.meta.get(protocol.CLASS, "")
                handle.schema = Schema.from_text(answer.meta.get(protocol.SCHEMA, ""))
        assert handle.schema is not None
        return handle.schema

    async def forward(self, handle: Handle, inputs: Sequence[torch.Tensor], timeout: float) -> Outcome:
        """Return the expert's output, from the leader or a replica with all updates acknowledged to this handle."""
        # 1. check and encode the inputs
        begin, acknowledged = time.monotonic(), handle.acknowledged
        schema = await self.learn(handle, timeout)
        num_rows = schema.check_inputs(inputs, handle.uid)
        meta = {protocol.UID: handle.uid, protocol.COMPRESSION: self.settings.compression}
        tensors = {str(n): x for n, x in enumerate(inputs)}
        data = encode(compress(tensors, self.settings.compression, meta))
        # 2. call
        left = timeout - (time.monotonic() - begin)
        answer, endpoint = await self._repeat(
            handle, left, lambda deadline: self._hedge(handle, protocol.FORWARD, data, deadline)
        )
        # 3. check the answer: a server is not trusted
        with _reading(endpoint, handle.uid):
            outcome = _outcome(answer, endpoint)
            if len(outcome.tensors) != 1:
                raise SchemaError(f"a forward has one output, but {len(outcome.tensors)} tensors came")
            schema.check_output(outcome.tensors[0], num_rows, handle.uid)
            if not is_finite(outcome.tensors[0]):
                raise SchemaError(f"the output of {handle.uid} holds NaN or infinity")
        # 4. note what it says of the expert
        seconds = time.monotonic() - begin
        usual = handle.usual_seconds
        handle.usual_seconds = seconds if usual is None else 0.9 * usual + 0.1 * seconds
        handle.gone_until = 0.0
        handle.version = max(handle.version, outcome.version)
        # _hedge() takes an older version from the leader alone: then the updates were lost with all replicas
        if outcome.version < acknowledged:
            handle.acknowledged = outcome.version
        if self.watcher is not None:
            try:
                await self.watcher.after_forward(handle, inputs, outcome, timeout - seconds)
            except errors.Cheated:
                self._note_failure(handle)
                raise
        return outcome

    async def backward(
        self,
        handle: Handle,
        inputs: Sequence[torch.Tensor],
        grad: torch.Tensor,
        seen_version: int,
        timeout: float,
    ) -> Outcome:
        """Send a gradient of the output -> the gradients of inputs; the expert makes one step, retries or not.

        seen_version: of the weights in the forward; a server with max_staleness refuses a gradient of too old ones.
        """
        begin = time.monotonic()
        # 1. if this call is audited, the weights before its update; ErrorFeedback changes what is sent, unknown to it
        is_exact = self.settings.compression == "none"
        watcher = self.watcher if is_exact else None
        before = None if watcher is None else await watcher.before_backward(handle, timeout / 2)
        # 2. encode once: every attempt sends the same bytes under the same request id
        meta = {
            protocol.UID: handle.uid,
            protocol.COMPRESSION: self.settings.compression,
            protocol.VERSION: str(seen_version),
            protocol.REQUEST_ID: secrets.token_hex(protocol.ID_LENGTH // 2),
        }
        if self.loss:
            meta[protocol.LOSS] = self.loss
        sent = compress({str(n): x for n, x in enumerate(inputs)}, self.settings.compression, meta)
        gradient = handle.feedback.compress({protocol.GRAD: grad}, {})  # inputs have no error to make up for
        data = encode(Message({**sent.tensors, **gradient.tensors}, {**sent.meta, **gradient.meta}))
        # 3. call; a leader that is silent must leave time to ask its successor, which knows the request by its id
        longest = max(timeout * self.settings.attempt_share, 0.1)

        async def attempt(deadline: float) -> tuple[Message, str]:
            record = await self._resolve(handle, deadline)
            left = min(longest, deadline - time.monotonic())
            endpoint = record.endpoints[0]  # only the leader takes gradients
            return await self.caller.call(endpoint, protocol.BACKWARD, data, left), endpoint

        answer, endpoint = await self._repeat(handle, timeout - (time.monotonic() - begin), attempt)
        # 4. check the answer: one gradient for each floating input, like it
        with _reading(endpoint, handle.uid):
            outcome = _outcome(answer, endpoint)
            wanted = [(x.dtype, list(x.shape)) for x in inputs if x.is_floating_point()]
            given = [(x.dtype, list(x.shape)) for x in outcome.tensors]
            if given != wanted:
                raise SchemaError(f"gradients of {wanted} were asked for, but {given[:8]} came")
            if not all(map(is_finite, outcome.tensors)):
                raise SchemaError("a gradient holds NaN or infinity")
        handle.version = max(handle.version, outcome.version)
        handle.acknowledged = max(handle.acknowledged, outcome.version)
        self.counts["gradients applied"] += 1
        if watcher is not None and before is not None:
            try:
                watcher.judge(handle, inputs, outcome, before, grad)
            except errors.Cheated:
                self._note_failure(handle)
                raise
        return outcome

    async def state(self, handle: Handle, endpoint: str, timeout: float) -> Message:
        """Return the whole state of an expert (server/state.py) as one server has it."""
        data = encode(Message({}, {protocol.UID: handle.uid}))
        cap = self.settings.max_state_bytes
        return await self.caller.download(endpoint, protocol.STATE, data, timeout, cap)

    async def close(self) -> None:
        """Close the connections."""
        await self.caller.close()

    # ---------------------------------------------------------------- attempts

    async def _repeat(
        self, handle: Handle, timeout: float, attempt: Callable[[float], Awaitable[tuple[Message, str]]]
    ) -> tuple[Message, str]:
        """Call attempt(deadline) until it succeeds, fails for good, or time is up."""
        begin = time.monotonic()
        deadline, pause = begin + timeout, _FIRST_PAUSE
        while True:
            self.counts["calls"] += 1
            try:
                return await attempt(deadline)
            except PASSING as error:
                failure = error
            # without a server for `patience` seconds it will hardly get one; other failures are worth the whole time
            now = time.monotonic()
            is_hopeless = isinstance(failure, errors.ExpertGone) and now - begin >= self.settings.patience
            if is_hopeless or now + pause >= deadline:
                self._note_failure(handle)
                # an expert that discovery cannot find is gone, for the caller
                kind: Any = errors.ExpertGone if isinstance(failure, DiscoveryError) else type(failure)
                remedy = _UNTRUSTED if "handshake failed" in str(failure) else _REMEDIES.get(kind, "")
                raise kind(f"{handle.uid} failed after {now - begin:.3g} s: {failure}{remedy}")
            if self.discovery is not None:  # ask it anew at the next attempt
                self.discovery.forget([handle.uid])
                handle.record = None
            self.counts["retries"] += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _resolve(self, handle: Handle, deadline: float) -> ExpertRecord:
        """Return the record of the expert, from discovery if it is not known; ExpertGone if there is none."""
        if handle.record is None and self.discovery is not None:
            left = max(0.0, deadline - time.monotonic())
            (found,) = await self.discovery.get([handle.uid], timeout=left)
            handle.record = found or handle.given
        if handle.record is None or not handle.record.endpoints:
            raise errors.ExpertGone(f"nobody hosts {handle.uid}")
        return handle.record

    async def _hedge(self, handle: Handle, method: str, data: bytes, deadline: float) -> tuple[Message, str]:
        """Return the first good answer of any replica; the next is called when one fails or is slower than usual."""
        record, acknowledged = await self._resolve(handle, deadline), handle.acknowledged
        waiting: dict[asyncio.Task[Message], str] = {}
        untried = list(record.endpoints)
        failure: errors.RemoteError | None = None
        try:
            while untried or waiting:
                if untried:
                    endpoint = untried.pop(0)
                    self.counts["hedges"] += bool(waiting)
                    call = self.caller.call(endpoint, method, data, deadline - time.monotonic())
                    waiting[asyncio.ensure_future(call)] = endpoint
                # how long until the next replica is called too; the guess is 1 s if no call of this expert was measured
                usual = handle.usual_seconds
                slow = 1.0 if usual is None else max(_HEDGE_FLOOR, _HEDGE_FACTOR * usual)
                hedge_after = self.settings.hedge_after
                pause = (slow if hedge_after is None else hedge_after) if untried else None
                done, _ = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    endpoint = waiting.pop(task)
                    error = task.exception()
                    if error is None:
                        answer = task.result()
                        if method != protocol.FORWARD or endpoint == record.endpoints[0]:
                            return answer, endpoint
                        # One that has left the members is still in this handle's record, and gets no more updates.
                        with _reading(endpoint, handle.uid):
                            version = answer.number(protocol.VERSION)
                        if version >= acknowledged:
                            return answer, endpoint
                        has = f"{endpoint} has version {version} of {handle.uid}"
                        error = errors.NoLeader(f"{has}, but version {acknowledged} was acknowledged")
                    if not isinstance(error, errors.RemoteError):
                        raise error
                    # of several failures the first, or a refusal, which says more than silence
                    if failure is None or isinstance(error, errors.Refused):
                        failure = error
        finally:
            for task in waiting:
                # one that fails now, or that ended beside the answer: asyncio logs errors that nobody reads
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
                task.cancel()
        assert failure is not None
        raise failure

    def _note_failure(self, handle: Handle) -> None:
        self.counts["failures"] += 1
        handle.gone_until = time.monotonic() + GONE_FOR


@contextmanager
def _reading(endpoint: str, uid: str) -> Iterator[None]:
    """Raise Refused, with the endpoint's name, for any error of the block, which reads a server's answer."""
    try:
        yield
    except errors.RemoteError:
        raise
    except Exception as error:
        raise errors.Refused(f"{endpoint} sent a bad answer for {uid}: {error}") from None


def _outcome(answer: Message, endpoint: str) -> Outcome:
    return Outcome(tuple(decompress(answer).values()), answer.number(protocol.VERSION), endpoint)
