"""The relay: nodes and servers that nobody can call are reached through it, by those who were let in."""

import asyncio
import contextlib

import pytest
import torch

from fmoe_ext.remote import DHT, DeclaredExperts, DiscoveryError, Options, Server, loop
from fmoe_ext.remote.dht.relay import Attachment, Relay, RelayOptions
from tests import ports
from tests.remote.conftest import wait_until

D = 16


@pytest.fixture
def relays(ends):
    """relays(**options) -> (Relay, "127.0.0.1:port")"""

    def start(listen_on=None, **options):
        relay = ends(Relay(RelayOptions(**options)))
        return relay, f"127.0.0.1:{loop.run(relay.start(listen_on or ports.endpoint()), 60)}"

    return start


@pytest.fixture
def attach(ends):
    def start(relay, target, token=""):
        attachment = Attachment(relay, target, token)
        attachment._port = ports.free_port()  # that it wants, as if it had been there before
        return ends(loop.run(attachment.start(30.0), 60))

    return start


async def echo(reader, writer):
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
def echo_server():
    server = loop.run(asyncio.start_server(echo, "127.0.0.1", 0), 60)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close():
        server.close()

    loop.run(close(), 60)


async def say(endpoint, data, timeout=30.0):
    """The answer to data that goes to an endpoint."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.rpartition(":")[2]))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.readexactly(len(data)), timeout)
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.close()


def test_bytes_go_through_unchanged(relays, attach, echo_server):
    _, relay = relays()
    endpoint = attach(relay, echo_server).endpoint
    data = torch.randint(256, (500_000,), dtype=torch.uint8).numpy().tobytes()

    async def several():
        return await asyncio.gather(*(say(endpoint, data[n:]) for n in range(4)))

    assert loop.run(several(), 60) == [data[n:] for n in range(4)]


def test_host_that_is_refused_gets_the_reason(relays, attach, echo_server):
    _, relay = relays(token="secret", max_hosts=1)
    with pytest.raises(DiscoveryError, match=f"{relay}.*another token"):
        attach(relay, echo_server, "guess")
    attach(relay, echo_server, "secret")
    with pytest.raises(DiscoveryError, match="no more than 1 hosts"):
        attach(relay, echo_server, "secret")
    with pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:1 cannot be used"):
        attach("127.0.0.1:1", echo_server)


def test_connections_of_a_host_are_bounded(relays, attach, echo_server):
    _, relay = relays(max_connections=2)
    endpoint = attach(relay, echo_server).endpoint

    async def run():
        held = [await asyncio.open_connection("127.0.0.1", int(endpoint.split(":")[1])) for _ in range(2)]
        refused = await say(endpoint, b"x")
        for _, writer in held:
            writer.close()
        return refused

    assert loop.run(run(), 60) == b""
    wait_until(lambda: loop.run(say(endpoint, b"x"), 60) == b"x")


@pytest.mark.parametrize(
    "line", [b"x" * 100_000, b"[1]\n", b"{}\n", b'{"accept": "0"}\n', b"\xff\n", b"[" * 400 + b"\n"]
)
def test_garbage_closes_the_connection(relays, line):
    relay, endpoint = relays()

    async def send():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.split(":")[1]))
        writer.write(line)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    assert loop.run(send(), 60) == b""
    assert relay.num_hosts == 0


def test_host_whose_port_cannot_be_opened_is_counted_no_more(relays, attach, echo_server, monkeypatch):
    """Such hosts counted for ever, until the relay refused all others."""
    relay, endpoint = relays()

    async def fail(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "start_server", fail)
        with pytest.raises(DiscoveryError, match="cannot be used"):
            attach(endpoint, echo_server)
    wait_until(lambda: not relay.num_hosts)


def test_host_that_leaves_frees_its_port(relays, attach, echo_server):
    relay, endpoint = relays()
    attachment = attach(endpoint, echo_server)
    assert relay.num_hosts == 1
    loop.run(attachment.close(), 60)
    wait_until(lambda: not relay.num_hosts)
    with pytest.raises(OSError):
        loop.run(say(attachment.endpoint, b"x"), 60)


def test_relay_that_comes_back_serves_the_same_port(relays, attach, echo_server):
    first, endpoint = relays()
    attachment = attach(endpoint, echo_server)
    before = attachment.endpoint
    loop.run(first.close(), 60)
    relays(listen_on=endpoint)

    def answers():
        with contextlib.suppress(OSError):
            return loop.run(say(attachment.endpoint, b"hello"), 60) == b"hello"

    wait_until(answers, "attached again")
    assert attachment.endpoint == before


def test_expert_behind_a_relay_trains(relays, attach):
    """The server and its node are called at the relay's ports only."""
    _, relay = relays()
    with DHT(listen_on=ports.endpoint(), start=True) as seed:
        peers = [f"127.0.0.1:{seed.port}"]
        with DHT(peers, listen_on=ports.endpoint(), relay=relay, start=True) as hidden:
            wait_until(lambda: len(seed.node.table))
            assert [peer.endpoint for peer in seed.node.table] != [f"127.0.0.1:{hidden.port}"]
            target = ports.endpoint()
            outside = attach(relay, target).endpoint
            options = Options(hidden_dim=D, expert_uids=("expert.0",), listen_on=target, announce=outside)
            with Server(options, DeclaredExperts(hidden.discovery)) as server:
                (expert,) = seed.get_experts(["expert.0"])
                assert expert.handle.record.endpoints == (outside,) != (target,)
                expert(torch.randn(2, D)).sum().backward()
                assert server.host.experts["expert.0"].version == 1
