"""Let hosts behind firewalls be called: Relay runs where all can reach it (fmoe-dht --relay_on), Attachment at a host.

The host keeps one control connection open to the relay, which opens a port for it. For each call to that port the relay
sends the host an id; the host answers it by a new connection, and the relay passes bytes between the two, unread, so
that TLS stays between the ends:
    caller ---- port of relay ==== new connection ---- Attachment ---- target port of the host
Each line of the protocol is JSON of at most _MAX_LINE bytes:
    control connection   host -> relay  {"attach": token, "port": wanted or 0}, then {} every _ALIVE_EVERY seconds
                         relay -> host  {"port": opened} or {"error": text}, then {"call": id} for each call
    new connection       host -> relay  {"accept": id}, then the bytes of the call both ways
"""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias

from fmoe_ext.remote.discovery import DiscoveryError

_MAX_LINE = 512  # bytes of a line of the protocol
CHUNK = 64 << 10  # bytes read at a time
# seconds for the first line of a connection, for the answer to it, and for a host to accept a call
PATIENCE = 10.0
# seconds between signs of life of a host, and without one until it counts as gone
_ALIVE_EVERY, _SILENT_FOR = 5.0, 20.0
RETRY_PAUSE = 1.0  # seconds before a host attaches again

Streams: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"


@dataclass(frozen=True)
class RelayOptions:
    """Options of a relay."""

    token: str = ""  # that hosts must show
    max_hosts: int = 64
    max_connections: int = 256  # to each host
    bytes_per_second: float = float("inf")  # of each direction of a connection
    idle: float = 600.0  # seconds without a byte after which a connection is closed


@dataclass
class _Call:
    """A call to a host's port."""

    accepted: asyncio.Future[Streams]  # set to the connection that the host makes for it
    ended: asyncio.Event  # set when the call is over, so that _welcome() may close that connection


class Relay:
    """The end that all can reach: it opens a port for each host that attaches to it."""

    def __init__(self, options: RelayOptions | None = None):
        self.options = options or RelayOptions()
        self.num_hosts = 0
        self._server: asyncio.Server | None = None
        self._waiting: dict[str, _Call] = {}  # calls that their host has not accepted yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._host = ""

    async def start(self, listen_on: str) -> int:
        """Listen -> the port; OSError if it is in use."""
        self._host, port = _split(listen_on)

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # asyncio would run a coroutine here as a task of its own, which close() could not end
            _keep(self._tasks, _closing(writer, self._welcome(reader, writer)))

        self._server = await asyncio.start_server(accept, self._host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection that a host has made: to accept a call, or to attach."""
        line = await _read(reader, PATIENCE)
        # 1. {"accept": id}: _join() passes bytes on; keep the connection until it is done
        call = self._waiting.pop(str(line.get("accept")), None)
        if call is not None and not call.accepted.done():
            call.accepted.set_result((reader, writer))
            await call.ended.wait()
            return
        if "attach" not in line:
            return
        # 2. {"attach": token}; compared in constant time, or the token could be guessed byte by byte
        if not hmac.compare_digest(str(line["attach"]).encode(), self.options.token.encode()):
            return await _write(writer, {"error": "the relay asks for another token"})
        if self.num_hosts >= self.options.max_hosts:
            most = f"the relay serves no more than {self.options.max_hosts} hosts"
            return await _write(writer, {"error": most})
        self.num_hosts += 1
        calls: set[asyncio.Task[None]] = set()

        def accept(caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter) -> None:
            if len(calls) >= self.options.max_connections:
                to_caller.close()
                return
            task = _keep(self._tasks, _closing(to_caller, self._join(caller, to_caller, writer)))
            calls.add(task)
            task.add_done_callback(calls.discard)

        # 3. a port for it; those below 1024 are for the system's own services
        wanted = line.get("port")
        port = wanted if type(wanted) is int and 1024 <= wanted < 1 << 16 else 0
        server: asyncio.Server | None = None
        try:
            try:
                server = await asyncio.start_server(accept, self._host, port)
            except OSError:  # the port that it had before is taken: another one, which it then announces
                server = await asyncio.start_server(accept, self._host, 0)
            await _write(writer, {"port": server.sockets[0].getsockname()[1]})
            while True:  # until it is silent or hangs up, which ends this by an error (_closing)
                await _read(reader, _SILENT_FOR)
        finally:
            self.num_hosts -= 1
            if server is not None:
                server.close()
            for call_from_outside in calls:
                call_from_outside.cancel()

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, control: asyncio.StreamWriter
    ) -> None:
        """Serve a call to a host's port: have the host make a connection for it, and pass bytes on between the two."""
        name, call = secrets.token_hex(16), _Call(asyncio.get_running_loop().create_future(), asyncio.Event())
        self._waiting[name] = call
        try:
            await _write(control, {"call": name})
            inside = await asyncio.wait_for(call.accepted, PATIENCE)
            await _splice((reader, writer), inside, self.options.bytes_per_second, self.options.idle)
        finally:
            self._waiting.pop(name, None)
            call.ended.set()


class Attachment:
    """A host's end of a relay: while it runs, what listens at `target` here can be called at `endpoint`."""

    def __init__(self, relay: str, target: str, token: str = ""):
        self.relay, self.target, self.token = relay, target, token
        self.endpoint = ""  # set by start(); another one if the relay was away and its port is taken
        self._port = 0  # 0: any
        self._control: Streams | None = None  # None while the relay is away
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, timeout: float = 5.0) -> "Attachment":
        """Attach; DiscoveryError if the relay does not accept this host within timeout seconds."""
        try:
            self._control = await asyncio.wait_for(self._attach(), timeout)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            raise DiscoveryError(f"the relay {self.relay} cannot be used: {error or 'no answer'}") from None
        _keep(self._tasks, self._stay())
        return self

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _attach(self) -> Streams:
        reader, writer = await asyncio.open_connection(*_split(self.relay))
        try:
            await _write(writer, {"attach": self.token, "port": self._port})
            line = await _read(reader, PATIENCE)
            if type(line.get("port")) is not int:
                raise ValueError(str(line.get("error"))[:_MAX_LINE])
        except BaseException:
            writer.close()
            raise
        # after a break the same port is asked for: callers know the endpoint
        self._port = line["port"]
        self.endpoint = f"{self.relay.rpartition(':')[0]}:{self._port}"
        return reader, writer

    async def _stay(self) -> None:
        """Accept calls for ever; when the relay was away, attach again, at the same port if it is free."""

        async def say_alive(writer: asyncio.StreamWriter) -> None:
            while True:
                await asyncio.sleep(_ALIVE_EVERY)
                with contextlib.suppress(OSError):
                    await _write(writer, {})

        async def answer_calls(reader: asyncio.StreamReader) -> None:
            while True:
                line = await _read(reader, None)
                _keep(self._tasks, self._answer(str(line.get("call"))[:64]))

        while True:
            if self._control is not None:
                reader, writer = self._control
                alive = _keep(self._tasks, say_alive(writer))
                await _closing(writer, answer_calls(reader))
                alive.cancel()
            await asyncio.sleep(RETRY_PAUSE)
            self._control = None
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                self._control = await asyncio.wait_for(self._attach(), PATIENCE)

    async def _answer(self, name: str) -> None:
        inside, outside = await asyncio.gather(
            asyncio.open_connection(*_split(self.target)),
            asyncio.open_connection(*_split(self.relay)),
            return_exceptions=True,
        )
        try:
            if isinstance(inside, tuple) and isinstance(outside, tuple):
                await _write(outside[1], {"accept": name})
                await _splice(inside, outside)
        finally:
            for streams in (inside, outside):
                if isinstance(streams, tuple):
                    streams[1].close()


async def _splice(one: Streams, other: Streams, rate: float = float("inf"), idle: float = 600.0) -> None:
    """Pass bytes both ways until one side ends, breaks, or is silent for `idle` seconds. rate: bytes per second."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await asyncio.wait_for(reader.read(CHUNK), idle):
            writer.write(data)
            await writer.drain()
            if rate != float("inf"):
                await asyncio.sleep(len(data) / rate)

    ways = [asyncio.ensure_future(pump(a[0], b[1])) for a, b in ((one, other), (other, one))]
    try:
        # HTTP/2 needs both directions: when one ends, the connection is over
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, timeout: float | None) -> dict[str, Any]:
    """Read one line; ValueError if it is none, IncompleteReadError at the end of the stream, TimeoutError."""
    try:
        data = await asyncio.wait_for(reader.readuntil(b"\n"), timeout)
    except asyncio.LimitOverrunError:
        data = b" " * (_MAX_LINE + 1)  # beyond the stream's own limit of 64 KiB, so too long in any case
    if len(data) > _MAX_LINE:
        raise ValueError(f"a line has at most {_MAX_LINE} bytes")
    line = json.loads(data)
    if not isinstance(line, dict):
        raise ValueError("a line must be a JSON object")
    return line


async def _write(writer: asyncio.StreamWriter, line: dict[str, Any]) -> None:
    writer.write(json.dumps(line).encode() + b"\n")
    await writer.drain()


async def _closing(writer: asyncio.StreamWriter, work: Coroutine[Any, Any, None]) -> None:
    """Do the work of a connection, then close it; errors that the other side causes end the work silently."""
    try:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            await work
    finally:
        writer.close()


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    # kept in a set until it is done: asyncio itself keeps only weak references, and close() cancels what is left
    task = asyncio.ensure_future(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def _split(endpoint: str) -> tuple[str, int]:
    """Return ("::1", 80) for "[::1]:80"."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
