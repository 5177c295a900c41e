"""The methods that clients call, and the thread that computes: every error a status code with one sentence.

One event loop reads calls and one thread computes; a queue lies between. So no expert needs a lock for its weights,
calls that wait are computed together, and a call that is slow to arrive holds up nobody. What could exhaust the server
is bounded before it is read: bytes by Intake, calls by the queue.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import torch

from fmoe_ext.memory import trim_heap
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
                self._run_batch(work)
            del work  # or the last batch stays in memory until the next one comes

    def _run_batch(self, batch: list[Job]) -> None:
        self.num_batches += 1
        self.num_jobs += len(batch)
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
    """The best copy of one expert."""

    version: int = -1
    due: float = 0.0  # time.monotonic() until which its holder should have looked again


class _CopiesElsewhere:
    """Holders of copies say so in their Info and State calls, with the seconds until they look again."""

    def __init__(self) -> None:
        self.is_leaving = False
        self._copies: dict[str, _Copy] = {}

    def note(self, request: Message, uid: str, version: int = -1) -> None:
        """A holder of a copy has looked, or has taken a copy of this version; other callers say no seconds."""
        try:
            every = float(request.meta[protocol.LOOKS_EVERY][:20])
        except (KeyError, ValueError):
            return
        if not 0 < every <= LONGEST_LOOK:
            return
        copy = self._copies.setdefault(uid, _Copy())
        copy.version = max(copy.version, version)
        if version < 0:
            copy.due = time.monotonic() + 2 * every + LATE_LOOK

    def is_awaited(self, uid: str, version: int) -> bool:
        """True if the holder of a copy of an expert will come for this version."""
        copy = self._copies.get(uid)
        return copy is not None and copy.version < version and time.monotonic() < copy.due


LONGEST_CALL = 600.0  # seconds, for callers without a deadline
CALLS_IN_FLIGHT = 8  # of the largest size, where no other bound is set
SHARE_FOR_ROOM = 0.5  # of a call's time, after which it is refused if there is no room for it
TRIM_BYTES = 64 << 20  # of calls that have ended, after which their memory goes back to the system
MAX_SHOWN_PEERS = 100
CHANGES = frozenset(("backward", "append", "join", "ready", "host"))  # experts, or who has them
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


@dataclass(frozen=True)
class Call:
    """A call that was let in and read."""

    message: Message
    peer: str  # the caller's name, or address
    deadline: float  # time.monotonic()
    held: Held  # the bytes that it holds, until its answer is sent


class Intake:
    """Lets calls in one by one: who may call, how much may come, and what went wrong as a status code.

    Nothing of a call is read before there is room for all of it, by the size that it announces. A call that sends more
    than it has announced needs room for each further part; grpc itself ends messages that are longer than a part may
    be, and holds a window of each call that waits. So a caller that lies costs a part and a window.
    """

    def __init__(
        self,
        guard: Guard,
        budget: ByteBudget,
        limits: Limits,
        ended: Callable[[str, grpc.StatusCode, float], None] = lambda name, code, seconds: None,
    ):
        self.guard, self.budget, self.limits = guard, budget, limits
        self._part_bytes = min(PART_BYTES, limits.max_message_bytes // 2)
        self._ended = ended  # of each call: its method's name, how it ended, and the seconds that it took
        self._ended_bytes = 0  # of calls that have ended since memory was given back
        budget.on_idle = self._trim

    def whole(self, name: str, answer: Callable[[Call], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        """A method that reads its message part by part, and answers by one."""

        async def method(requests: AsyncIterator[bytes], context: Any) -> bytes:
            async with self.answering(name, requests, context) as call:
                return encode(await answer(call))
            raise AssertionError("abort() does not return")

        return grpc.stream_unary_rpc_method_handler(method)

    def in_parts(self, name: str, answer: Callable[[Call], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        """A method whose answer comes in parts too, and who calls it sends none before there is room for all."""

        async def method(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async with self.answering(name, requests, context, in_parts=True) as call:
                for part in encode_parts(await answer(call), self._part_bytes):
                    yield part

        return grpc.stream_stream_rpc_method_handler(method)

    @contextlib.asynccontextmanager
    async def answering(
        self, name: str, requests: AsyncIterator[bytes], context: Any, in_parts: bool = False
    ) -> AsyncIterator[Call]:
        """The call; ends it with a status code if the block raises. Calls that change experts need the right to."""
        begin, code = time.monotonic(), Code.OK
        try:
            # the size comes before the message, which may be long and is not read yet
            text = str(dict(context.invocation_metadata() or ()).get(protocol.BYTES, ""))
            is_number = text.isascii() and text.isdecimal() and len(text) <= 12
            announced = int(text) if is_number else 0
            peer = self.guard.admit(context, announced, gradient=name in CHANGES)
            if announced > self.budget.limit:
                raise WireError(
                    f"a call of {announced} bytes is more than this server takes at a time, {self.budget.limit} "
                    "(--max_bytes_in_flight): send fewer rows a call"
                )
            # a call that announces nothing, or nonsense, needs room for the largest
            room = announced if is_number else min(self.limits.max_message_bytes, self.budget.limit)
            seconds = min(context.time_remaining() or LONGEST_CALL, LONGEST_CALL)
            held = await self.budget.take(peer, room, seconds * SHARE_FOR_ROOM)
            context.add_done_callback(lambda _: held.release())  # when the reply is on its way
            if in_parts:
                await context.send_initial_metadata(((protocol.ROOM, "1"),))
            try:
                message = await asyncio.wait_for(self._read(requests, held, announced), seconds)
            except asyncio.TimeoutError:
                raise DeadlinePassed(f"the call did not come whole within {seconds:.3g} s") from None
            yield Call(message, peer, begin + seconds, held)
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
            self._ended(name, code, time.monotonic() - begin)

    async def _read(self, requests: AsyncIterator[bytes], held: Held, announced: int) -> Message:
        """The message of a call, which comes whole or in parts."""
        data, charged = bytearray(), announced
        async for part in requests:
            size = len(data) + len(part)
            if size > self.limits.max_message_bytes:
                raise WireError(
                    f"a call has at most {self.limits.max_message_bytes} bytes (--max_message_bytes), but "
                    f"{size} came: send fewer rows a call"
                )
            # a caller that announced less than it sends pays, and needs room, as it goes
            self.guard.charge(held.peer, size - charged)
            charged = max(charged, size)
            held.resize(max(held.count, size))
            data += part
        if not data:
            raise WireError("the call has no message")
        held.resize(len(data))
        message = decode(data, self.limits)
        held.resize(len(data) + unpacked_bytes(message))  # compressed tensors take more memory than they sent
        self._ended_bytes += held.count
        return message

    def _trim(self) -> None:
        """Gives freed memory back: grpc's small pieces keep what glibc would give back from the top of its heap."""
        if self._ended_bytes >= TRIM_BYTES:
            self._ended_bytes = 0
            # later, when the last frames of the call are gone; elsewhere, because it takes milliseconds
            loop = asyncio.get_running_loop()
            loop.call_later(0.1, loop.run_in_executor, None, trim_heap)


class ExpertService:
    """Info, Forward, Backward, State over a computing thread."""

    def __init__(
        self,
        compute: ComputeThread,
        guard: Guard,
        metrics: Metrics,
        limits: Limits,
        budget: ByteBudget | None = None,
    ):
        self.compute, self.metrics, self.limits = compute, metrics, limits
        self.max_rows: int | None = None  # of one call
        self.budget = budget or ByteBudget(CALLS_IN_FLIGHT * limits.max_message_bytes)

        def ended(name: str, code: grpc.StatusCode, seconds: float) -> None:
            metrics.add("calls_total", method=name, code=code.name)
            metrics.time("call_seconds", seconds, method=name)

        self.intake = Intake(guard, self.budget, limits, ended)
        self.may_read: Callable[[str], None] = lambda uid: None  # raises NotLeader to refuse a forward
        self.describe: Callable[[str], dict[str, str]] = lambda uid: {}
        # name: time.monotonic() of its last call, loss it reported
        self.peers: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self.copies = _CopiesElsewhere()
        self.withheld: set[str] = set()  # hosted, but claimed by another server
        self._under_way: dict[tuple[str, str], asyncio.Future[Answer]] = {}

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods. Each reads its message itself, when there is memory for it; some do it in parts too."""
        info, forward, backward, state = (
            functools.partial(self._answer, method)
            for method in (self._info, self._forward, self._backward, self._state)
        )
        methods = {
            "Info": self.intake.whole("info", info),
            "Forward": self.intake.whole("forward", forward),
            "Forward" + protocol.IN_PARTS: self.intake.in_parts("forward", forward),
            "Backward": self.intake.whole("backward", backward),
            "Backward" + protocol.IN_PARTS: self.intake.in_parts("backward", backward),
            "State": self.intake.in_parts("state", state),
        }
        return grpc.method_handlers_generic_handler(protocol.SERVICE, methods)

    async def _answer(self, method: Callable[[Call], Awaitable[Message]], call: Call) -> Message:
        """The method's answer, for a caller that the status page shows."""
        loss = call.message.meta.get(protocol.LOSS) or self.peers.pop(call.peer, (0.0, ""))[1]
        self.peers[call.peer] = (time.monotonic(), loss[:20])
        self.peers.move_to_end(call.peer)
        while len(self.peers) > MAX_SHOWN_PEERS:
            self.peers.popitem(last=False)
        return await method(call)

    async def _info(self, call: Call) -> Message:
        host = self.compute.host
        expert = host.find(self._served(call.message))
        self.copies.note(call.message, expert.uid)
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
        return Message({}, meta)

    async def _forward(self, call: Call) -> Message:
        uid, inputs, _ = self._unpack(call.message, has_grad=False)
        self.may_read(uid)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.compute.queue.put(Job(uid, inputs, _settle_soon(future), peer=call.peer, deadline=call.deadline))
        return self._reply(call.message, await future)

    async def _backward(self, call: Call) -> Message:
        message = call.message
        uid, inputs, grad = self._unpack(message, has_grad=True)
        self.compute.host.may_step(uid)
        request_id = message.meta.get(protocol.REQUEST_ID, "")
        is_id = len(request_id) == protocol.ID_LENGTH and set(request_id) <= set("0123456789abcdef")
        if request_id and not is_id:
            digits = f"{protocol.ID_LENGTH} hexadecimal digits"
            raise WireError(f"a request id has {digits}, but this one is {request_id[:50]!r}")
        seen = message.number(protocol.VERSION) if protocol.VERSION in message.meta else None
        key = (uid, request_id)
        # a client that repeats a call while the first one waits gets the answer of that one: it is one update
        future = self._under_way.get(key)
        if future is None or not request_id:
            future = asyncio.get_running_loop().create_future()
            job = Job(uid, inputs, _settle_soon(future), grad, request_id, seen, call.peer, call.deadline)
            most = body_bytes(self.limits.max_message_bytes)
            if job.num_bytes > most:  # unpacked, it would fit in no message to another server
                raise SchemaError(
                    f"inputs and gradient for {uid} hold {job.num_bytes} bytes, at most {most} are taken "
                    "(--max_message_bytes): send fewer rows a call"
                )
            self.compute.queue.put(job)
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key, None))
        # shielded: others may wait for it after this caller left
        return self._reply(message, await asyncio.shield(future))

    async def _state(self, call: Call) -> Message:
        message, host = call.message, self.compute.host
        uid = message.text(protocol.UID)
        seconds = (call.deadline - time.monotonic()) * SHARE_FOR_ROOM
        await call.held.wait_for(host.state_bytes(uid), seconds)  # its copy is of that size
        state = await asyncio.wrap_future(self.compute.call(lambda: read_state(host, uid)))
        self.copies.note(message, uid, int(state.meta[protocol.VERSION]))
        return state

    def _served(self, message: Message) -> str:
        uid = message.text(protocol.UID)
        if uid in self.withheld:
            raise ExpertMissing(f"{uid} belongs to another server now: it is kept here, but not served")
        return uid

    def _unpack(
        self, message: Message, has_grad: bool
    ) -> tuple[str, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """uid, inputs and gradient of a call; SchemaError if they are not what the expert takes."""
        tensors, host = decompress(message), self.compute.host
        grad = tensors.pop(protocol.GRAD, None) if has_grad else None
        if has_grad and grad is None:
            raise SchemaError("a backward call needs a tensor called 'grad'")
        inputs = tuple(tensors.pop(str(n)) for n in range(len(tensors)) if str(n) in tensors)
        uid = host.find(self._served(message)).uid
        if tensors:
            raise SchemaError(f"unknown tensors for {uid}: {', '.join(sorted(tensors))[:200]}")
        rows = host.schema.check_inputs(inputs, uid, self.max_rows)
        host.schema.check_bytes(rows, body_bytes(self.limits.max_message_bytes), uid)
        check_finite({f"input {n}": x for n, x in enumerate(inputs)}, uid)
        if grad is not None:
            host.schema.check_grad(grad, inputs, uid)
            check_finite({"the gradient": grad}, uid)
        return uid, inputs, grad

    def _reply(self, request: Message, answer: Answer) -> Message:
        codec = request.meta.get(protocol.COMPRESSION, "none")
        if codec not in CODECS:
            raise WireError(f"unknown compression {codec[:50]!r}: use one of {', '.join(CODECS)}")
        tensors = {str(n): x for n, x in enumerate(answer.tensors)}
        return compress(tensors, codec, {protocol.VERSION: str(answer.version)})


def _settle_soon(future: "asyncio.Future[Answer]") -> Callable[[object], None]:
    """A function for another thread that settles the future on its loop, unless the caller is gone."""

    def settle(result: object) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
            future.exception()  # read, even if no caller waits any more
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def settle_soon(result: object) -> None:
        future.get_loop().call_soon_threadsafe(settle, result)

    return settle_soon
