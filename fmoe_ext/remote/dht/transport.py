"""GrpcTransport: carry bytes between DHT nodes over grpc, and refuse peers that send too much.

KademliaNode uses call(), serve(), address() and close() alone, so the tests' simulation puts a network of its own here.
"""

import asyncio
import functools
import ipaddress
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from fmoe_ext.remote import protocol
from fmoe_ext.remote.dht.messages import MAX_ANSWER_BYTES, MAX_REQUEST_BYTES, METHODS, SERVICE, BadMessage
from fmoe_ext.remote.security import Rates, host_of

_MAX_CHANNELS = 256  # open to other nodes
MAX_CALLS = 256  # answered at a time
_BYTES_PER_SECOND = 32 << 20  # of each address that calls
GRACE = 0.5  # seconds that calls under way have when the node closes
Handler: TypeAlias = (
    "Callable[[str, bytes, str], Awaitable[bytes]]"  # method, request, host of the caller -> answer
)


class Unreachable(Exception):
    """A node did not answer; the text says which and why."""


class GrpcTransport:
    """Calls over grpc.aio, with caps on sizes, calls at a time, open channels, and rates of each caller's address.

    call() raises Unreachable within about `timeout` seconds; serve() returns the port.
    """

    def __init__(self, calls_per_second: float = 1000.0):
        self._calls, self._bytes = Rates(calls_per_second), Rates(_BYTES_PER_SECOND)
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._busy: dict[str, int] = {}  # calls under way
        self._server: grpc.aio.Server | None = None
        self._addresses: OrderedDict[str, str] = OrderedDict()  # of hosts that are names

    async def address(self, endpoint: str) -> str:
        """Return what an endpoint counts as in the clock: its IPv4 address, or the /64 network of its IPv6 address.

        A name without an address counts as itself.
        """
        host = endpoint.rpartition(":")[0].strip("[]")
        address = _network_of(host) or self._addresses.get(host)
        if address is None:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(host, None)
                address = _network_of(str(found[0][4][0])) or host
            except OSError:
                address = host
            self._addresses[host] = address
            while len(self._addresses) > _MAX_CHANNELS:
                self._addresses.popitem(last=False)
        return address

    async def call(self, endpoint: str, method: str, data: bytes, timeout: float) -> bytes:
        self._busy[endpoint] = self._busy.get(endpoint, 0) + 1
        try:
            channel = self._channels.get(endpoint)
            if channel is None:
                channel = grpc.aio.insecure_channel(endpoint, protocol.channel_options(MAX_ANSWER_BYTES))
                self._channels[endpoint] = channel
            self._channels.move_to_end(endpoint)
            if len(self._channels) > _MAX_CHANNELS:
                # the least recently used channel goes, unless a call is under way on it
                idle = next((one for one in self._channels if one not in self._busy), None)
                if idle is not None:
                    closing = asyncio.ensure_future(self._channels.pop(idle).close())
                    closing.add_done_callback(lambda _: None)
            send = channel.unary_unary(f"/{SERVICE}/{method}")
            return bytes(await asyncio.wait_for(send(data, timeout=timeout), timeout + 0.1))
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"{endpoint}: {error.code().name} {(error.details() or '')[:200]}") from None
        except (asyncio.TimeoutError, grpc.aio.UsageError) as error:
            raise Unreachable(f"{endpoint} did not answer within {timeout:.3g} s {error}") from None
        finally:
            self._busy[endpoint] -= 1
            if not self._busy[endpoint]:
                del self._busy[endpoint]

    async def serve(self, listen_on: str, handler: Handler) -> int:
        # requests are smaller than answers, and never in parts
        options = dict(protocol.server_options(MAX_ANSWER_BYTES))
        options["grpc.max_receive_message_length"] = MAX_REQUEST_BYTES
        self._server = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=MAX_CALLS)

        async def answer(name: str, data: bytes, context: Any) -> bytes:
            # rates are counted by address and not by node id, because ids cost nothing
            host = host_seen(context.peer())
            if not (self._calls.take(host, 1) and self._bytes.take(host, len(data))):
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{host} sends more than its rate allows"
                )
            try:
                return await handler(name, data, host)
            except BadMessage as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:500])
                raise

        methods = {n: grpc.unary_unary_rpc_method_handler(functools.partial(answer, n)) for n in METHODS}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        try:
            port = self._server.add_insecure_port(listen_on)
        except RuntimeError as error:
            raise OSError(
                f"the DHT cannot listen on {listen_on}: is the port in use, the address this host's? ({error})"
            ) from None
        await self._server.start()
        return int(port)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(GRACE)
        channels, self._channels = list(self._channels.values()), OrderedDict()
        for channel in channels:
            await channel.close()


def _network_of(host: str) -> str | None:
    """Return an IPv4 address as it is, an IPv6 address without the 64 bits that a host chooses; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


def host_seen(peer: str) -> str:
    """Return the host in grpc's name of a peer as endpoints have it: "10.0.0.1", "[::1]"; IPv4 in IPv6 as IPv4."""
    host = host_of(peer)
    return f"[{host}]" if peer.startswith("ipv6:") and ":" in host else host
