"""Bad networks between hosts.

BadNetwork: a TCP proxy that delays, stalls and cuts. A stream keeps its order, so a lost packet shows as what TCP
makes of it: a pause until it is sent again; and streams overtake each other.
BadPost: whole calls are lost on their way or on the way back, come twice, late, and in another order.
"""

import asyncio
import contextlib
import random

from fmoe_ext.remote import CallTimeout, RemoteError, loop


class BadNetwork:
    """Proxies to any number of endpoints. delay: seconds one way; jitter: its share; loss: packets that stall."""

    def __init__(self, delay=0.05, jitter=0.5, loss=0.02, cut=0.0, seed=0):
        self.delay, self.jitter, self.loss, self.cut = delay, jitter, loss, cut
        self.random = random.Random(seed)
        self.stalled = self.cuts = 0
        self._servers, self._tasks = [], set()

    def to(self, endpoint):
        """The endpoint of a proxy to an endpoint."""
        return loop.run(self._start(endpoint), 60)

    async def _start(self, endpoint):
        async def connected(reader, writer):
            host, _, port = endpoint.rpartition(":")
            try:
                there_reader, there_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.transport.abort()
                return
            ends = (writer, there_writer)
            for pair in ((reader, there_writer), (there_reader, writer)):
                task = asyncio.ensure_future(self._pump(*pair, ends))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pump(self, reader, writer, ends):
        clock, due, queue = asyncio.get_running_loop(), 0.0, asyncio.Queue()

        async def deliver():
            while True:
                when, data = await queue.get()
                await asyncio.sleep(max(0.0, when - clock.time()))
                writer.write(data)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            while data := await reader.read(64 << 10):
                wait = self.delay * (1 + self.random.uniform(-self.jitter, self.jitter))
                if self.random.random() < self.loss:
                    self.stalled += 1
                    wait += 0.2  # TCP's least time until it sends again
                if self.random.random() < self.cut:
                    self.cuts += 1
                    break
                due = max(due, clock.time() + wait)
                queue.put_nowait((due, data))
        except OSError:
            pass
        finally:
            delivery.cancel()
            for end in ends:
                end.transport.abort()

    def close(self):
        async def stop():
            for server in self._servers:
                server.close()
            for task in list(self._tasks):
                task.cancel()

        loop.run(stop(), 60)


class BadPost:
    """Calls of any number of Callers. lost: of questions, and of answers; twice: of questions; delay: seconds, of each
    call its own, so that later ones overtake it; a copy comes up to 20 delays later."""

    def __init__(self, lost=0.05, twice=0.1, delay=0.01, seed=0):
        self.lost, self.twice, self.delay = lost, twice, delay
        self.random = random.Random(seed)
        self.num_lost_questions = self.num_lost_answers = self.num_copies = 0
        self._copies = set()

    def carry(self, caller):
        """From now on a Caller's calls go by this post."""
        deliver = caller.call

        async def call(endpoint, method, data, timeout):
            await asyncio.sleep(self.random.uniform(0, 2 * self.delay))
            if self.random.random() < self.lost:
                self.num_lost_questions += 1
                raise CallTimeout(f"the question to {endpoint} was lost")
            if self.random.random() < self.twice:
                self.num_copies += 1
                copy = asyncio.ensure_future(self._late(deliver(endpoint, method, data, timeout)))
                self._copies.add(copy)
                copy.add_done_callback(self._copies.discard)
            answer = await deliver(endpoint, method, data, timeout)
            if self.random.random() < self.lost:
                self.num_lost_answers += 1
                raise CallTimeout(f"the answer of {endpoint} was lost")
            return answer

        caller.call = call

    async def _late(self, call):
        await asyncio.sleep(self.random.uniform(0, 20 * self.delay))
        with contextlib.suppress(RemoteError):
            await call
