"""A network of nodes in one process: no sockets, no clock but its own, the same at every run."""

import asyncio
import contextlib
import importlib
import random
import time
import types
from unittest import mock

from fmoe_ext.remote.dht import Identity, KademliaDiscovery, KademliaNode, NodeOptions
from fmoe_ext.remote.dht.node import NetworkClock
from fmoe_ext.remote.dht.transport import Unreachable
from tests.remote.simulation.virtual import VirtualLoop

NEVER = 1e9
CLOCKED = ("beam_search", "discovery", "dht.discovery", "dht.lookup", "dht.node")


def run(coroutine):
    """Its result. Time passes only while all wait, so that no call is late on a machine that stands still."""
    loop = VirtualLoop()
    clock = types.SimpleNamespace(time=time.time, monotonic=loop.time)
    with contextlib.ExitStack() as stack:
        for name in CLOCKED:
            module = importlib.import_module(f"fmoe_ext.remote.{name}")
            stack.enter_context(mock.patch.object(module, "time", clock))
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.drain()


class Network:
    """node(...) makes and starts nodes; kill() is a crash; cut(group) keeps a group from the rest."""

    def __init__(self, seed=0):
        self.rng, self.handlers, self.seconds = random.Random(seed), {}, 1.7e9
        self.transports = {}
        self.cut_off = frozenset()
        self.num_calls = 0

    async def node(self, *peers, listen=True, skew=0.0, address="", **options):
        """A started node with an endpoint "nodeN:1", and what it finds and declares."""
        transport = SimulatedTransport(self)
        transport.address_seen = address or transport.address_seen
        options = NodeOptions(
            tuple(endpoint_of(peer) for peer in peers),
            transport.endpoint if listen else None,
            refresh_period=NEVER,
            **options,
        )
        rng = random.Random(self.rng.getrandbits(64))
        node = KademliaNode(transport, options, NetworkClock(lambda: self.seconds + skew), rng)
        await node.start()
        return KademliaDiscovery(node, Identity(rng.randbytes(32)))

    async def nodes(self, count):
        """count nodes, each of which knew one random earlier one."""
        found = [await self.node()]
        while len(found) < count:
            found.append(await self.node(self.rng.choice(found)))
        return found

    def kill(self, discovery):
        self.handlers.pop(endpoint_of(discovery), None)

    def cut(self, *group):
        self.cut_off = frozenset(map(endpoint_of, group))


def endpoint_of(discovery):
    return discovery.node.transport.endpoint


async def close(nodes):
    for discovery in nodes:
        await discovery.close()


class SimulatedTransport:
    number = 0

    def __init__(self, network):
        SimulatedTransport.number += 1
        self.network, self.endpoint = network, f"node{SimulatedTransport.number}:1"
        self.address_seen = self.endpoint.partition(":")[0]  # nodes of one host share it
        network.transports[self.endpoint] = self

    async def call(self, endpoint, method, data, timeout):
        self.network.num_calls += 1
        await asyncio.sleep(0)
        handler = self.network.handlers.get(endpoint)
        cut_off = self.network.cut_off
        if handler is None or (endpoint in cut_off) != (self.endpoint in cut_off):
            raise Unreachable("nobody is there")
        return await handler(method, data, self.endpoint.partition(":")[0])

    async def address(self, endpoint):
        owner = self.network.transports.get(endpoint)
        return owner.address_seen if owner else endpoint.partition(":")[0]

    async def serve(self, listen_on, handler):
        self.network.handlers[self.endpoint] = handler
        return 1

    async def close(self):
        self.network.handlers.pop(self.endpoint, None)
