"""Answer clients' calls. A call goes through three stages, of which the last runs on a thread of its own.

    Intake          checks who calls, waits until there is memory for the whole message, and only then reads it
    ExpertService   compares the tensors with the expert's schema, and puts a Job into the queue
    ComputeThread   takes jobs that wait as one batch, runs it on the ExpertHost, and hands the answers to the loop
One event loop serves all connections and one thread computes, so an expert's weights need no lock, and the device waits
for no call that is slow to arrive. Intake bounds the bytes of calls before it reads them, the queue their number.
An error reaches the caller as a grpc status code with one sentence: CODES.
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
    """Takes batches and tasks from a queue and runs them, the batches by a host, until stop()."""

    def __init__(self, host: ExpertHost, queue: FairQueue):
        self.host, self.queue = host, queue
        self.num_batches = 0
        self.num_jobs = 0
        self.num_crashes = 0
        self._thread = threading.Thread(target=self._run, name="fmoe-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread once all that waits in the queue is done, or stop waiting for it after `timeout` seconds."""
        self.queue.close()
        self._thread.join(timeout)

    def call(self, function: Callable[[], T]) -> "concurrent.futures.Future[T]":
        """Run function() on the computing thread, between two batches."""
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
        except Exception as error:
            # run() answers with errors itself; one that it raises must not end this thread
            self.num_crashes += 1
            traceback.print_exc()
            for job in batch:
                job.done(error)


# seconds between looks; a server that leaves does not wait for holders that look more rarely
LONGEST_LOOK = 4.0
LATE_LOOK = 3.0  # seconds that a look may be late on a busy machine; one whole look may fail besides


@dataclass
class _Copy:
    """The newest copy of one expert that another server holds."""

    version: int = -1  # -1: its holder has looked, but copied nothing yet
    due: float = 0.0  # time.monotonic() by which its holder should have looked again


class _CopiesElsewhere:
    """Warm copies that other servers hold of the experts here, so that a server which leaves can wait for the last one.

    A holder looks at its owner by Info and copies by State; both calls say after how many seconds it looks again.
    """

    def __init__(self) -> None:
        self.is_leaving = False
        self._copies: dict[str, _Copy] = {}

    def note(self, request: Message, uid: str, version: int = -1) -> None:
        """Note that the holder of a copy has looked (version -1), or has copied this version; ignore other callers."""
        try:
            every = float(request.meta[protocol.LOOKS_EVERY][:20])
        except (KeyError, ValueError):
            return  # a client: it says no seconds
        if not 0 < every <= LONGEST_LOOK:
            return
        copy = self._copies.setdefault(uid, _Copy())
        copy.version = max(copy.version, version)
        if version < 0:  # a look; twice its period, because one look may fail
            copy.due = time.monotonic() + 2 * every + LATE_LOOK

    def is_awaited(self, uid: str, version: int) -> bool:
        """True if another server's copy of an expert is older than this version and it should look again soon."""
        copy = self._copies.get(uid)
        return copy is not None and copy.version < version and time.monotonic() < copy.due


_LONGEST_CALL = 600.0  # seconds; also for callers without a deadline
_CALLS_IN_FLIGHT = 8  # calls of the largest size that memory is kept for, if the machine's memory is unknown
SHARE_FOR_ROOM = 0.5  # of a call's time that it may wait for memory; then it is refused and may go elsewhere
_TRIM_BYTES = 64 << 20  # of calls that have ended, after which freed memory is given back to the system
_MAX_SHOWN_PEERS = 100  # on the status page
# Methods that change experts or where they are hosted: --allow_backward decides who may call them.
CHANGES = frozenset(("backward", "append", "join", "ready", "host"))
Code = grpc.StatusCode
# How the client takes them: client.caller._translate. Any other error is INTERNAL.
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
    """A call that was admitted and read."""

    message: Message
    peer: str  # the caller's name, or address
    deadline: float  # time.monotonic()
    held: Held  # the bytes that it holds, until its answer is sent


class Intake:
    """Admits calls: checks who calls, waits for memory, reads the message, and turns errors into status codes.

    Messages between replicas go through an Intake of their own (replication/messages.py).
    A call announces its size in grpc's metadata, and nothing of it is read before there is memory for all of that. One
    that sends more than it has announced needs room for each further part. grpc itself refuses messages that are longer
    than a part may be (protocol.WHOLE_BYTES), and buffers one window (WINDOW_BYTES) of each call that waits. So a
    caller that lies about its size costs the server one part and one window.
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
        self._ended = ended  # called after each call with its method's name, its status code, and its seconds
        self._ended_bytes = 0  # of calls read since memory was last given back to the system
        budget.on_idle = self._trim

    def whole(self, name: str, answer: Callable[[Call], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        """Make a grpc method that reads a request in one part or several, and sends its answer whole."""

        async def method(requests: AsyncIterator[bytes], context: Any) -> bytes:
            async with self.answering(name, requests, context) as call:
                return encode(await answer(call))
            raise AssertionError("abort() does not return")

        return grpc.stream_unary_rpc_method_handler(method)

    def in_parts(self, name: str, answer: Callable[[Call], Awaitable[Message]]) -> grpc.RpcMethodHandler:
        """Make a grpc method that sends its answer in parts; its callers wait for ROOM before they send theirs."""

        async def method(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async with self.answering(name, requests, context, in_parts=True) as call:
                for part in encode_parts(await answer(call), self._part_bytes):
                    yield part

        return grpc.stream_stream_rpc_method_handler(method)

    @contextlib.asynccontextmanager
    async def answering(
        self, name: str, requests: AsyncIterator[bytes], context: Any, in_parts: bool = False
    ) -> AsyncIterator[Call]:
        """Admit and read a call for the block; if that or the block raises, end the call with a status code."""
        begin, code = time.monotonic(), Code.OK
        try:
            # 1. may this peer call, and how much does it announce? The message itself is not read yet
            text = str(dict(context.invocation_metadata() or ()).get(protocol.BYTES, ""))
            is_number = text.isascii() and text.isdecimal() and len(text) <= 12
            announced = int(text) if is_number else 0
            peer = self.guard.admit(context, announced, gradient=name in CHANGES)
            if announced > self.budget.limit:
                raise WireError(
                    f"a call of {announced} bytes is more than this server takes at a time, {self.budget.limit} "
                    "(--max_bytes_in_flight): send fewer rows a call"
                )
            # 2. wait for memory; a call that announces nothing, or nonsense, needs room for the largest
            room = announced if is_number else min(self.limits.max_message_bytes, self.budget.limit)
            seconds = min(context.time_remaining() or _LONGEST_CALL, _LONGEST_CALL)
            held = await self.budget.take(peer, room, seconds * SHARE_FOR_ROOM)
            context.add_done_callback(lambda _: held.release())  # grpc has the reply, or the caller is gone
            if in_parts:
                await context.send_initial_metadata(((protocol.ROOM, "1"),))
            # 3. read the message, and let the block answer it
            try:
                message = await asyncio.wait_for(self._read(requests, held, announced), seconds)
            except asyncio.TimeoutError:
                raise DeadlinePassed(f"the call did not come whole within {seconds:.3g} s") from None
            yield Call(message, peer, begin + seconds, held)
        # 4. say what went wrong; abort() raises
        except Denied as error:
            code = error.code
            await context.abort(code, str(error))
        except (asyncio.CancelledError, GeneratorExit):  # the caller has hung up
            code = Code.CANCELLED
            raise
        except Exception as error:
            code = next((c for kind, c in CODES if isinstance(error, kind)), Code.INTERNAL)
            await context.abort(code, f"{error}" if code is not Code.INTERNAL else repr(error)[:500])
        finally:
            self._ended(name, code, time.monotonic() - begin)

    async def _read(self, requests: AsyncIterator[bytes], held: Held, announced: int) -> Message:
        """Read the message of a call, in one part or several, and hold memory for what it really takes."""
        data, charged = bytearray(), announced
        async for part in requests:
            size = len(data) + len(part)
            if size > self.limits.max_message_bytes:
                raise WireError(
                    f"a call has at most {self.limits.max_message_bytes} bytes (--max_message_bytes), but "
                    f"{size} came: send fewer rows a call"
                )
            # what goes beyond the announced size counts for the peer's rate, and needs room, as it comes
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
        """Give freed memory back to the system, when no call is under way.

        glibc does that by itself only at the top of its heap, where small pieces of grpc's are in the way.
        """
        if self._ended_bytes >= _TRIM_BYTES:
            self._ended_bytes = 0
            # in 0.1 s, when grpc has freed the last frames of the call; on another thread, for it takes milliseconds
            loop = asyncio.get_running_loop()
            loop.call_later(0.1, loop.run_in_executor, None, trim_heap)


class ExpertService:
    """The methods Info, Forward, Backward and State; they check a call and leave the work to a ComputeThread."""

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
        self.budget = budget or ByteBudget(_CALLS_IN_FLIGHT * limits.max_message_bytes)

        def ended(name: str, code: grpc.StatusCode, seconds: float) -> None:
            metrics.add("calls_total", method=name, code=code.name)
            metrics.time("call_seconds", seconds, method=name)

        self.intake = Intake(guard, self.budget, limits, ended)
        self.may_read: Callable[[str], None] = lambda uid: None  # raises NotLeader to refuse a forward
        self.describe: Callable[[str], dict[str, str]] = lambda uid: {}
        # by name, most recent last: time.monotonic() of the last call, and the loss that was last reported
        self.peers: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self.copies = _CopiesElsewhere()
        self.withheld: set[str] = set()  # uids hosted here but claimed by another server: not served
        self._under_way: dict[tuple[str, str], asyncio.Future[Answer]] = {}  # gradients, by (uid, request id)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Make the grpc methods; Forward and Backward exist twice, with whole messages and in parts."""
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
        """Note the caller for the status page, then run the method."""
        loss = call.message.meta.get(protocol.LOSS) or self.peers.pop(call.peer, (0.0, ""))[1]
        self.peers[call.peer] = (time.monotonic(), loss[:20])
        self.peers.move_to_end(call.peer)
        while len(self.peers) > _MAX_SHOWN_PEERS:
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
        # A call that is repeated while its first one still waits gets the answer of that one: together they are one
        # update. One that comes later is recognised by the ledger (ExpertHost._answer_without_update).
        future = self._under_way.get(key)
        if future is None or not request_id:
            future = asyncio.get_running_loop().create_future()
            job = Job(uid, inputs, _settle_soon(future), grad, request_id, seen, call.peer, call.deadline)
            most = body_bytes(self.limits.max_message_bytes)
            if job.num_bytes > most:  # compressed it came, but followers get it unpacked, in one message
                raise SchemaError(
                    f"inputs and gradient for {uid} hold {job.num_bytes} bytes, at most {most} are taken "
                    "(--max_message_bytes): send fewer rows a call"
                )
            self.compute.queue.put(job)
            self._under_way[key] = future
            future.add_done_callback(lambda _: self._under_way.pop(key, None))
        # shielded: a caller that hangs up must not cancel what a repeated call waits for
        return self._reply(message, await asyncio.shield(future))

    async def _state(self, call: Call) -> Message:
        message, host = call.message, self.compute.host
        uid = message.text(protocol.UID)
        seconds = (call.deadline - time.monotonic()) * SHARE_FOR_ROOM
        # memory for the copy, not for the small request
        await call.held.wait_for(host.state_bytes(uid), seconds)
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
        """Return uid, inputs and gradient of a call; SchemaError if they are not what the expert takes."""
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
    """Return a function that sets a future's result or exception from another thread, unless the caller is gone."""

    def settle(result: object) -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
            future.exception()  # counts as read: asyncio logs exceptions that no caller awaits
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def settle_soon(result: object) -> None:
        future.get_loop().call_soon_threadsafe(settle, result)

    return settle_soon
