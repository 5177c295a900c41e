"""The methods that clients call, and the thread that computes: every error a status code with one sentence."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from fmoe_ext.remote import protocol
from fmoe_ext.remote.schema import SchemaError, check_finite
from fmoe_ext.remote.security import Denied, Guard
from fmoe_ext.remote.server.fair_queue import ByteBudget, DeadlinePassed, FairQueue, Held, Job, QueueFull
from fmoe_ext.remote.server.host import Answer, ExpertHost, ExpertMissing, StaleGradient
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.server.pages import Metrics
from fmoe_ext.remote.server.state import read_state
from fmoe_ext.remote.wire import (
    CODECS,
    PART_BYTES,
    Limits,
    Message,
    WireError,
    body_bytes,
    compress,
    decode,
    decompress,
    encode,
    encode_parts,
    unpacked_bytes,
)

T = TypeVar("T")


class ComputeThread:
    """Runs batches and tasks of a queue through a host until stop()."""

    def __init__(self, host: ExpertHost, queue: FairQueue):
        self.host, self.queue = host, queue
        self.num_batches = 0
        self.num_jobs = 0
        self.num_crashes = 0
        self._thread = threading.Thread(target=self._run, name="fmoe-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Finishes what waits, then ends."""
        self.queue.close()
        self._thread.join(timeout)

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """function() on the computing thread, between two batches."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.queue.put_task(task)
        return future

    def _run(self) -> None:
        while (work := self.queue.take()) is not None:
            if callable(work):
                work()
            elif work:
                self.num_batches += 1
                self.num_jobs += len(work)
                self._run_batch(work)
            del work  # or the last batch stays in memory until the next one comes

    def _run_batch(self, batch: list[Job]) -> None:
        try:
            self.host.run(batch)
        except Exception as error:  # whatever happens, the next batch is served
            self.num_crashes += 1
            traceback.print_exc()
            for job in batch:
                job.done(error)


LONGEST_LOOK = 4.0  # seconds; who claims to look more rarely is not waited for
LATE_LOOK = 3.0  # seconds that a look may be late on a busy machine, beside one that is left out


@dataclass
class _Copy:
    """The best copy of one expert: which version it is, until when its holder should have looked again."""

    version: int = -1
    due: float = 0.0


class _CopiesElsewhere:
    """Holders of copies say so in their Info and State calls, with the seconds until they look again."""

    def __init__(self) -> None:
        self.is_leaving = False
        self._copies: dict[str, _Copy] = {}

    def note_look(self, request: Message, uid: str) -> None:
        every = _seconds(request)
        if every is not None:
            self._copies.setdefault(uid, _Copy()).due = time.monotonic() + 2 * every + LATE_LOOK

    def note_copy(self, request: Message, uid: str, version: int) -> None:
        if _seconds(request) is not None and uid in self._copies:
            self._copies[uid].version = max(self._copies[uid].version, version)

    def is_awaited(self, uid: str, version: int) -> bool:
        """True if the holder of a copy of an expert will come for this version."""
        copy = self._copies.get(uid)
        return copy is not None and copy.version < version and time.monotonic() < copy.due


def _seconds(request: Message) -> float | None:
    """The seconds between looks of a holder of copies; None for other callers, and for nonsense."""
    try:
        every = float(request.meta[protocol.LOOKS_EVERY][:20])
    except (KeyError, ValueError):
        return None
    return every if 0 < every <= LONGEST_LOOK else None


LONGEST_CALL = 600.0  # seconds, for callers without a deadline
CALLS_IN_FLIGHT = 8  # of the largest size, where no other bound is set
SHARE_FOR_ROOM = 0.5  # of a call's time, after which it is refused if there is no room for it
MAX_SHOWN_PEERS = 100
Code = grpc.StatusCode


CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (WireError, Code.INVALID_ARGUMENT),
    (SchemaError, Code.INVALID_ARGUMENT),
    (ExpertMissing, Code.NOT_FOUND),
    (QueueFull, Code.RESOURCE_EXHAUSTED),
    (StaleGradient, Code.FAILED_PRECONDITION),
    (NotLeader, Code.FAILED_PRECONDITION),
    (DeadlinePassed, Code.DEADLINE_EXCEEDED),
)


class ExpertService:
    """Info, Forward, Backward, State over a computing thread. may_step(uid) raises NotLeader to refuse gradients."""

    def __init__(self, compute: ComputeThread, guard: Guard, metrics: Metrics, limits: Limits):
        self.compute, self.guard, self.metrics, self.limits = compute, guard, metrics, limits
        self.max_rows: int | None = None  # of one call
        self.budget = ByteBudget(CALLS_IN_FLIGHT * limits.max_message_bytes)
        self._part_bytes = min(PART_BYTES, limits.max_message_bytes // 2)
        self.may_step: Callable[[str], None] = lambda uid: None
        self.describe: Callable[[str], dict[str, str]] = lambda uid: {}
        # name: time.monotonic() of its last call, loss it reported
        self.peers: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self.copies = _CopiesElsewhere()
        self.withheld: set[str] = set()  # hosted, but claimed by another server
        self._under_way: dict[tuple[str, str], asyncio.Future[Answer]] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods. Each reads its one message itself, when there is memory for it."""
        unary = {"Info": self._info, "Forward": self._forward, "Backward": self._backward}
        methods = {
            name: grpc.stream_unary_rpc_method_handler(self._method(name.lower(), call))
            for name, call in unary.items()
        }
        methods["State"] = grpc.stream_stream_rpc_method_handler(self._state_in_parts)
        return grpc.method_handlers_generic_handler(protocol.SERVICE, methods)

    def _method(
        self, name: str, call: Callable[[Message, str, float], Awaitable[bytes]]
    ) -> Callable[..., Any]:
        async def method(requests: AsyncIterator[bytes], context: Any) -> bytes:
            async with self._answering(name, requests, context) as (message, peer, deadline):
                return await call(message, peer, deadline)
            raise AssertionError("abort() does not return")

        return method

    async def _state_in_parts(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async with self._answering("state", requests, context) as (message, _, _):
            for part in encode_parts(await self._state(message), self._part_bytes):
                yield part

    @contextlib.asynccontextmanager
    async def _answering(
        self, name: str, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[tuple[Message, str, float]]:
        """The message of a call, its peer and deadline; ends the call with a status code if the block raises."""
        begin, code = time.monotonic(), Code.OK
        try:
            announced = _announced(context)
            peer = self.guard.admit(context, announced or 0, gradient=name == "backward")
            seconds = min(context.time_remaining() or LONGEST_CALL, LONGEST_CALL)
            room = self._room_for(announced)
            held = await self.budget.take(peer, room, seconds * SHARE_FOR_ROOM)
            context.add_done_callback(lambda _: held.release())  # when the reply is on its way
            message = await self._read(requests, held, announced or 0)
            self._note_peer(peer, message)
            yield message, peer, begin + seconds
        except Denied as error:
            code = error.code
            await context.abort(code, str(error))
        except (asyncio.CancelledError, GeneratorExit):
            code = Code.CANCELLED
            raise
        except Exception as error:
            code = next((c for kind, c in CODES if isinstance(error, kind)), Code.INTERNAL)
            await context.abort(code, f"{error}" if code is not Code.INTERNAL else repr(error)[:500])
        finally:
            self.metrics.add("calls_total", method=name, code=code.name)
            self.metrics.time("call_seconds", time.monotonic() - begin, method=name)

    def _room_for(self, announced: int | None) -> int:
        """The bytes to keep free for a call before it is read."""
        if announced is None:
            return min(self.limits.max_message_bytes, self.budget.limit)
        if announced > self.budget.limit:
            raise WireError(
                f"a call of {announced} bytes is more than this server takes at a time, {self.budget.limit} "
                "(--max_bytes_in_flight): send fewer rows a call"
            )
        return announced

    async def _read(self, requests: AsyncIterator[bytes], held: Held, announced: int) -> Message:
        """The one message of a call."""
        async for data in requests:
            self.guard.charge(held.peer, len(data) - announced)
            held.resize(len(data))
            message = decode(data, self.limits)
            held.resize(max(len(data), unpacked_bytes(message)))
            return message
        raise WireError("the call has no message")

    def _note_peer(self, peer: str, message: Message) -> None:
        loss = message.meta.get(protocol.LOSS) or self.peers.pop(peer, (0.0, ""))[1]
        self.peers[peer] = (time.monotonic(), loss[:20])
        self.peers.move_to_end(peer)
        while len(self.peers) > MAX_SHOWN_PEERS:
            self.peers.popitem(last=False)

    async def _info(self, message: Message, peer: str, deadline: float) -> bytes:
        host = self.compute.host
        expert = host.find(self._served(message))
        self.copies.note_look(message, expert.uid)
        meta = {
            protocol.UID: expert.uid,
            protocol.SCHEMA: host.schema.to_text(),
            protocol.CLASS: host.expert_class.name,
            protocol.HIDDEN_DIM: str(host.hidden_dim),
            protocol.VERSION: str(expert.version),
            protocol.REQUESTS: str(expert.num_requests),
            protocol.LEAVING: str(int(self.copies.is_leaving)),
            **self.describe(expert.uid),
        }
        return encode(Message({}, meta))

    async def _forward(self, message: Message, peer: str, deadline: float) -> bytes:
        tensors = decompress(message)
        inputs = tuple(tensors.pop(str(n)) for n in range(len(tensors)) if str(n) in tensors)
        uid = self._check(message, inputs, tensors)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.compute.queue.put(Job(uid, inputs, _settle_soon(future), peer=peer, deadline=deadline))
        return self._reply(message, await future)

    async def _backward(self, message: Message, peer: str, deadline: float) -> bytes:
        tensors = decompress(message)
        grad = tensors.pop(protocol.GRAD, None)
        if grad is None:
            raise SchemaError("a backward call needs a tensor called 'grad'")
        inputs = tuple(tensors.pop(str(n)) for n in range(len(tensors)) if str(n) in tensors)
        uid = self._check(message, inputs, tensors)
        self.compute.host.schema.check_grad(grad, inputs, uid)
        check_finite({"the gradient": grad}, uid)
        self.may_step(uid)
        request_id, seen = _request_id(message), _seen_version(message)
        key = (uid, request_id)
        future = self._under_way.get(key)
        if future is None or not request_id:
            future = asyncio.get_running_loop().create_future()
            job = Job(uid, inputs, _settle_soon(future), grad, request_id, seen, peer, deadline)
            self._check_size(job)
            self.compute.queue.put(job)
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key, None))
        return self._reply(message, await asyncio.shield(future))

    async def _state(self, message: Message) -> Message:
        uid = _text(message, protocol.UID)
        self.compute.host.find(uid)
        state = await asyncio.wrap_future(self.compute.call(lambda: read_state(self.compute.host, uid)))
        self.copies.note_copy(message, uid, int(state.meta[protocol.VERSION]))
        return state

    def _check_size(self, job: Job) -> None:
        """Refuses a gradient that, unpacked, fits in no message to another server."""
        most = body_bytes(self.limits.max_message_bytes)
        if job.num_bytes > most:
            raise SchemaError(
                f"inputs and gradient for {job.uid} hold {job.num_bytes} bytes, at most {most} are taken "
                "(--max_message_bytes): send fewer rows a call"
            )

    def _served(self, message: Message) -> str:
        uid = _text(message, protocol.UID)
        if uid in self.withheld:
            raise ExpertMissing(f"{uid} belongs to another server now: it is kept here, but not served")
        return uid

    def _check(self, message: Message, inputs: tuple[Any, ...], others: dict[str, Any]) -> str:
        uid, host = self._served(message), self.compute.host
        host.find(uid)
        if others:
            raise SchemaError(f"unknown tensors for {uid}: {', '.join(sorted(others))[:200]}")
        rows = host.schema.check_inputs(inputs, uid, self.max_rows)
        host.schema.check_bytes(rows, body_bytes(self.limits.max_message_bytes), uid)
        check_finite({f"input {n}": x for n, x in enumerate(inputs)}, uid)
        return uid

    def _reply(self, request: Message, answer: Answer) -> bytes:
        codec = request.meta.get(protocol.COMPRESSION, "none")
        if codec not in CODECS:
            raise WireError(f"unknown compression {codec[:50]!r}: use one of {', '.join(CODECS)}")
        tensors = {str(n): x for n, x in enumerate(answer.tensors)}
        return encode(compress(tensors, codec, {protocol.VERSION: str(answer.version)}))


def _settle_soon(future: "asyncio.Future[Answer]") -> Callable[[object], None]:
    """A function for another thread that settles the future on its loop, unless the caller is gone."""
    loop = future.get_loop()

    def settle(result: object) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
            future.exception()  # read, even if no caller waits any more
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def settle_soon(result: object) -> None:
        loop.call_soon_threadsafe(settle, result)

    return settle_soon


def _announced(context: Any) -> int | None:
    """The bytes that a call says it has; None if it says nothing that makes sense."""
    text = str(dict(context.invocation_metadata() or ()).get(protocol.BYTES, ""))
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else None


def _text(message: Message, key: str) -> str:
    value = message.meta.get(key)
    if not value:
        raise WireError(f"the call does not say {key}")
    return value


def _request_id(message: Message) -> str:
    text = message.meta.get(protocol.REQUEST_ID, "")
    if text and (len(text) != protocol.ID_LENGTH or not set(text) <= set("0123456789abcdef")):
        raise WireError(
            f"a request id has {protocol.ID_LENGTH} hexadecimal digits, but this one is {text[:50]!r}"
        )
    return text


def _seen_version(message: Message) -> int | None:
    text = message.meta.get(protocol.VERSION)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise WireError(f"a version is a number, but this one is {text[:50]!r}")
    return int(text)
