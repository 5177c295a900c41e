"""A bad network between hosts: a TCP proxy that delays, stalls and cuts. A stream keeps its order, so a lost packet
shows as what TCP makes of it: a pause until it is sent again; and streams overtake each other."""

import asyncio
import random

from fmoe_ext.remote import loop


class BadNetwork:
    """Proxies to any number of endpoints. delay: seconds one way; jitter: its share; loss: packets that stall."""

    def __init__(self, delay=0.05, jitter=0.5, loss=0.02, cut=0.0, seed=0):
        self.delay, self.jitter, self.loss, self.cut = delay, jitter, loss, cut
        self.random = random.Random(seed)
        self.stalled = self.cuts = 0
        self._servers, self._tasks = [], set()

    def to(self, endpoint, listen_port=0):
        """The endpoint of a proxy to endpoint (which may be decided later: a function)."""
        return loop.run(self._start(endpoint, listen_port), 5)

    async def _start(self, endpoint, listen_port):
        async def connected(reader, writer):
            host, _, port = (endpoint() if callable(endpoint) else endpoint).rpartition(":")
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

        server = await asyncio.start_server(connected, "127.0.0.1", listen_port)
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

        loop.run(stop(), 5)
