"""Send and receive the messages between replicas; docs/replication.md has the table of them.

Append carries an update from the leader to a follower, or none: then it is a probe. An update names the end of the log
before it, so a follower recognises one that comes late, twice or after a gap.

A Sender keeps the order of one follower's appends: it has one call under way. It repeats a call that failed at once,
while there is time, because the server may be about to listen. Any other failure ends the Sender: the leader removes
its server from the members, and the server takes a copy.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc
import torch

from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.server.ledger import ID_BYTES, End, Request, Term, Update, pack_ids, unpack_ids
from fmoe_ext.remote.server.service import SHARE_FOR_ROOM, Call, ComputeThread, Intake
from fmoe_ext.remote.wire import Message, WireError, encode

SERVICE = "fmoe.Replicas"
APPEND, JOIN = f"/{SERVICE}/Append", f"/{SERVICE}/Join"
READY, HOST = f"/{SERVICE}/Ready", f"/{SERVICE}/Host"


@dataclass(frozen=True)
class Append:
    """A leader's update, or a probe without one, which asks: does your log end at `end`?"""

    uid: str
    term: Term  # of the leader
    committed: int  # version that every member has
    end: End  # of the leader's log, up to this update
    update: Update | None = None


@dataclass(frozen=True)
class Reply:
    """A follower's answer to an append."""

    is_accepted: bool
    end: End  # of its log
    seen: Term  # the largest term that it knows of
    reason: str = ""  # why it is refused; "" for a log that ends elsewhere
    is_early: bool = False  # accepted, but it waits for a copy: the log has it only if the copy comes


def append_message(append: Append) -> Message:
    """Return the message of an append. Its requests' rows are joined: one tensor an input, however many requests."""
    update = append.update
    meta = {"uid": append.uid, "committed": str(append.committed)}
    meta |= {**append.term.meta("term"), **_end("end", append.end)}
    if update is None:
        return Message({}, meta)
    meta |= {**_end("previous", update.previous), "digest": update.digest}
    requests = update.requests
    inputs = [_joined(parts) for parts in zip(*(r.inputs for r in requests), strict=True)]
    tensors = {
        "ids": pack_ids(r.request_id for r in requests),
        "rows": torch.tensor([r.grad.shape[0] for r in requests], dtype=torch.int64, device="cpu"),
        "grad": _joined([r.grad for r in requests]),
        **{str(n): x for n, x in enumerate(inputs)},
    }
    return Message(tensors, meta)


def read_append(message: Message) -> Append:
    """Return the append in a message; WireError if there is none."""
    # a probe has no tensors
    uid, end = message.meta.get("uid", ""), _read_end(message, "end")
    term, committed = Term.read(message, "term"), message.number("committed")
    if "ids" not in message.tensors:
        return Append(uid, term, committed, end)
    # all parts must be there and fit together: ids [16 R], rows [R], grad and inputs [sum of rows, *] for R requests
    given = dict(message.tensors)
    ids, rows, grad = (given.pop(key, None) for key in ("ids", "rows", "grad"))
    inputs = [given[str(n)] for n in range(len(given)) if str(n) in given]
    if ids is None or rows is None or grad is None or not inputs or len(inputs) != len(given):
        raise WireError("an update needs ids, rows, grad and inputs")
    if ids.dtype != torch.uint8 or ids.dim() != 1 or ids.numel() != rows.numel() * ID_BYTES:
        raise WireError("the ids of an update must be 16 bytes for each request")
    counts = rows.tolist() if rows.dtype == torch.int64 and rows.dim() == 1 else []
    total = sum(counts)
    if not counts or min(counts) < 1 or any(x.dim() < 1 or x.shape[0] != total for x in (grad, *inputs)):
        raise WireError("the rows of an update do not add up")
    # apart again, by request
    by_request = zip(*(x.split(counts) for x in inputs), strict=True)
    # 32 zeros stand for a request without an id
    requests = tuple(
        Request(name if name.strip("0") else "", tuple(xs), g)
        for name, g, xs in zip(unpack_ids(ids), grad.split(counts), by_request, strict=True)
    )
    update = Update(uid, _read_end(message, "previous"), end, requests, message.meta.get("digest", ""))
    return Append(uid, term, committed, end, update)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _end(key: str, end: End) -> dict[str, str]:
    return {**end.term.meta(f"{key}_term"), f"{key}_version": str(end.version)}


def _read_end(message: Message, key: str) -> End:
    return End(Term.read(message, f"{key}_term"), message.number(f"{key}_version"))


_MAX_UNSENT = 1024  # appends in a Sender's queue; a server that is further behind takes a copy instead
PAUSE = 0.05  # seconds between two attempts
QUICK = (errors.ExpertGone, errors.NoLeader)  # failures that come at once: the server may be about to listen


class Sender:
    """Sends appends to one server in order. put() returns a future of the reply, or of None once the sender is dead."""

    def __init__(self, peers: Caller, server: str, endpoint: str, timeout: float):
        self.server, self.endpoint = server, endpoint
        self.is_dead = False
        self.failure = ""  # why it is dead
        self.begun = asyncio.get_running_loop().time()
        self._peers, self._timeout = peers, timeout
        self._queue: asyncio.Queue[tuple[Append, asyncio.Future[Reply | None]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def put(self, append: Append) -> "asyncio.Future[Reply | None]":
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        if self.is_dead or self._queue.qsize() >= _MAX_UNSENT:
            self._die(self.failure if self.is_dead else "too far behind")
            future.set_result(None)
        else:
            self._queue.put_nowait((append, future))
        return future

    async def _run(self) -> None:
        while not self.is_dead:
            append, future = await self._queue.get()
            try:
                reply = await self._send(append)
                # a follower that refuses an update would refuse all later ones too; a probe's answer may be no
                if not reply.is_accepted and append.update is not None:
                    self._die(reply.reason or "refused")
                settle(future, reply)
            except Exception as error:
                # of any kind: with a sender that ended silently, updates would wait for ever
                self._die(f"{type(error).__name__}: {error}")
            finally:  # also when stop() cancels this: a caller waits for the future
                settle(future, None)

    async def _send(self, append: Append) -> Reply:
        """Call until it succeeds, fails slowly, or time is up; a follower recognises an append that comes twice."""
        clock = asyncio.get_running_loop().time
        data, end = encode(append_message(append)), clock() + self._timeout
        while True:
            try:
                answer = await self._peers.call(self.endpoint, APPEND, data, end - clock())
                is_accepted, reason = answer.number("accepted") == 1, answer.meta.get("reason", "")
                end_and_seen = _read_end(answer, "end"), Term.read(answer, "seen")
                return Reply(is_accepted, *end_and_seen, reason, answer.meta.get("early") == "1")
            except QUICK:
                if clock() + PAUSE >= end:
                    raise
                await asyncio.sleep(PAUSE)

    def _die(self, reason: str) -> None:
        self.is_dead, self.failure = True, reason
        while not self._queue.empty():
            settle(self._queue.get_nowait()[1], None)

    def stop(self) -> None:
        self._task.cancel()
        self._die(self.failure or "stopped")


def settle(future: "asyncio.Future[Reply | None]", result: Reply | None) -> None:
    """Set a future's result, unless it has one."""
    if not future.done():
        future.set_result(result)


def reply_message(reply: Reply) -> Message:
    """Return the message of a reply."""
    meta = {"accepted": str(int(reply.is_accepted)), "reason": reply.reason[:500]}
    meta["early"] = str(int(reply.is_early))
    return Message({}, {**meta, **reply.seen.meta("seen"), **_end("end", reply.end)})


def replica_handlers(
    answer: Callable[[str, Message], Awaitable[Message]], intake: Intake, compute: ComputeThread
) -> grpc.GenericRpcHandler:
    """Make the grpc methods that other servers call; a copy (Join) comes in parts.

    answer(path, message) -> this server's answer. intake: one with a budget of its own. Clients' gradients hold memory
    while they wait for followers; if their Appends had to wait for that memory, two servers that follow each other
    could wait for ever. Servers need the same rights as clients that send gradients (service.CHANGES).
    """

    async def handle(path: str, call: Call) -> Message:
        try:
            if path == JOIN:  # memory for the copy, which is as large as the expert
                size = compute.host.state_bytes(call.message.text(protocol.UID))
                await call.held.wait_for(size, (call.deadline - time.monotonic()) * SHARE_FOR_ROOM)
            reply = await answer(path, call.message)
        except ValueError as error:
            raise WireError(str(error)[:500]) from None
        if path == APPEND and (call.message.tensors and reply.meta["accepted"] == "1"):
            # It is answered once it is in the log, but its tensors hold memory until the weights have it.
            held = call.held.move()
            applied = asyncio.wrap_future(compute.call(lambda: None))
            applied.add_done_callback(lambda _: held.release())
        return reply

    append, join, ready, host = (functools.partial(handle, path) for path in (APPEND, JOIN, READY, HOST))
    methods = {
        "Append": intake.whole("append", append),
        "Append" + protocol.IN_PARTS: intake.in_parts("append", append),
        "Join": intake.in_parts("join", join),
        "Ready": intake.whole("ready", ready),
        "Host": intake.whole("host", host),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)
