"""Sender: the updates of one expert to one follower, in order, each acknowledged."""

import asyncio
import time

from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.errors import RemoteError

MAX_UNSENT = 1024  # entries; a follower that is further behind takes a copy instead


class Sender:
    """put() entries; each future is True when the follower has it, False if it never will (then is_dead)."""

    def __init__(self, caller: Caller, server: str, endpoint: str, method: str, timeout: float):
        self.server, self.endpoint = server, endpoint
        self.is_member = False  # its acknowledgement is needed
        self.is_dead = False
        self.failure = ""
        self.begun = time.monotonic()
        self._caller, self._method, self._timeout = caller, method, timeout
        self._queue: asyncio.Queue[tuple[bytes, asyncio.Future[bool]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def put(self, data: bytes) -> "asyncio.Future[bool]":
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.is_dead or self._queue.qsize() >= MAX_UNSENT:
            self._die("too far behind" if not self.is_dead else self.failure)
            future.set_result(False)
        else:
            self._queue.put_nowait((data, future))
        return future

    async def _run(self) -> None:
        while True:
            data, future = await self._queue.get()
            try:
                await self._caller.call(self.endpoint, self._method, data, self._timeout)
                _settle(future, True)
            except RemoteError as error:
                self._die(str(error))
                return
            finally:  # after stop() too: somebody waits for it
                _settle(future, False)

    def _die(self, reason: str) -> None:
        self.is_dead, self.failure = True, reason
        while not self._queue.empty():
            _settle(self._queue.get_nowait()[1], False)

    def stop(self) -> None:
        self._task.cancel()
        self._die("stopped")


def _settle(future: "asyncio.Future[bool]", result: bool) -> None:
    if not future.done():
        future.set_result(result)
