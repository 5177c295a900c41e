"""The network of a simulation: delays, losses, repetitions, cuts in one direction or both."""

import asyncio
import contextvars

from fmoe_ext.remote import errors
from fmoe_ext.remote.server.host import ExpertMissing
from fmoe_ext.remote.server.ledger import NotLeader


class Network:
    """rng decides everything. loss, repeat: shares of messages; strange: share of calls that raise what none should."""

    def __init__(self, loop, rng):
        self.loop, self.rng = loop, rng
        self.loss = self.repeat = self.strange = self.etcd_loss = 0.0
        self.max_delay = 0.01
        self.max_bytes = 1 << 30
        self.cuts = set()  # (from, to); None is etcd
        self.servers = {}  # endpoint: SimServer
        self.num_messages = 0
        self._outside = contextvars.copy_context()
        self._last = {}

    def later(self, delay, function):
        """function() of no process."""
        self.loop.call_later(delay, function, context=self._outside.copy())

    def in_order(self, stream, function):
        """function() after a delay, and not before those that were given earlier for the stream."""
        at = max(self.loop.time() + self._delay(), self._last.get(id(stream), 0.0) + 1e-6)
        self._last[id(stream)] = at
        self.loop.call_at(at, function, context=self._outside.copy())

    def _delay(self):
        slow = self.rng.random() < 0.02
        return self.rng.uniform(0.0005, self.max_delay) * (20 if slow else 1)

    def is_cut(self, sender, receiver):
        names = tuple(None if one is None else one.name for one in (sender, receiver))
        return names in self.cuts

    def is_cut_off(self, process):
        """True if what etcd says does not reach a process."""
        return (None, process.name) in self.cuts or self.is_cut(process, None)

    async def to_etcd(self, process, etcd, work):
        future = self.loop.create_future()

        def arrive():
            if etcd.is_paused:
                self.later(0.05, arrive)
                return
            if self.is_cut(process, None):
                return
            try:
                result, error = work(), None
            except Exception as caught:
                result, error = None, caught
            if self.rng.random() < self.etcd_loss or (None, process.name) in self.cuts:
                return  # done, but nobody knows
            self.later(self._delay(), lambda: _settle(future, result, error))

        if self.rng.random() >= self.etcd_loss:
            self.later(self._delay(), arrive)
        self.num_messages += 1
        return await future

    async def call(self, process, endpoint, handle, size=0):
        """The answer of handle(server), which runs in the process of the server at an endpoint."""
        future = self.loop.create_future()
        if self.rng.random() < self.strange:
            raise OverflowError("a bug in some library")
        if size > self.max_bytes:
            raise errors.Busy("the message is larger than the server takes")

        def arrive():
            server = self.servers.get(endpoint)
            if server is None or server.process.is_dead:
                gone = errors.ExpertGone(f"{endpoint}: connection refused")
                self.later(self._delay(), lambda: _settle(future, None, gone))
            elif not self.is_cut(process, server.process):
                server.process.spawn(answer(server))

        async def answer(server):
            try:
                result, error = await handle(server), None
            except Exception as caught:
                result, error = None, _translate(caught)
            if self.rng.random() >= self.loss and not self.is_cut(server.process, process):
                self.later(self._delay(), lambda: _settle(future, result, error))

        self.num_messages += 1
        if self.rng.random() >= self.loss:
            self.later(self._delay(), arrive)
        if self.rng.random() < self.repeat:
            self.later(self._delay() * 30, arrive)
        return await future


def _translate(error):
    if isinstance(error, errors.RemoteError):
        return error
    if isinstance(error, NotLeader):
        return errors.NoLeader(str(error))
    if isinstance(error, ExpertMissing):
        return errors.ExpertGone(str(error))
    return errors.Refused(f"{type(error).__name__}: {error}")


def _settle(future, result, error):
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class SimPeers:
    """Stands for the Caller of a server."""

    def __init__(self, network, process):
        self.network, self.process = network, process

    async def call(self, endpoint, method, data, timeout):
        from fmoe_ext.remote.wire import STATE, decode

        async def handle(server):
            return await server.placement.answer(method, decode(data, STATE))

        if timeout <= 0:
            raise errors.CallTimeout("no time was left")
        try:
            return await asyncio.wait_for(
                self.network.call(self.process, endpoint, handle, len(data)), timeout
            )
        except asyncio.TimeoutError:
            raise errors.CallTimeout(f"{endpoint} did not answer") from None

    download = call

    async def close(self):
        pass
