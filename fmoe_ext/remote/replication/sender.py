"""Sender: the updates of one expert to one member or joining server, in order, each confirmed."""

import asyncio

from fmoe_ext.remote import errors
from fmoe_ext.remote.replication.effects import Peers
from fmoe_ext.remote.replication.messages import APPEND, Append, Reply, append_message, read_reply
from fmoe_ext.remote.wire import encode

MAX_UNSENT = 1024  # entries; a server that is further behind takes a copy instead
PAUSE = 0.05  # seconds between attempts
QUICK = (errors.ExpertGone, errors.NoLeader)


class Sender:
    """put() messages; each future has the reply, or None if there never will be one (then is_dead)."""

    def __init__(self, peers: Peers, server: str, endpoint: str, timeout: float):
        self.server, self.endpoint = server, endpoint
        self.is_dead = False
        self.failure = ""
        self.begun = asyncio.get_running_loop().time()
        self._peers, self._timeout = peers, timeout
        self._queue: asyncio.Queue[tuple[Append, asyncio.Future[Reply | None]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def put(self, append: Append) -> "asyncio.Future[Reply | None]":
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        if self.is_dead or self._queue.qsize() >= MAX_UNSENT:
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
                if not reply.is_accepted and append.logged is not None:
                    self._die(reply.reason or "refused")
                settle(future, reply)
            except Exception as error:  # whatever it is: this server does not follow any more
                self._die(f"{type(error).__name__}: {error}")
            finally:  # after stop() too: a caller waits for it
                settle(future, None)

    async def _send(self, append: Append) -> Reply:
        """Repeats a call that failed at once, within the timeout: a second copy does no harm."""
        clock = asyncio.get_running_loop().time
        data, end = encode(append_message(append)), clock() + self._timeout
        while True:
            try:
                return read_reply(await self._peers.call(self.endpoint, APPEND, data, end - clock()))
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
    """Sets a result, unless there is one."""
    if not future.done():
        future.set_result(result)
