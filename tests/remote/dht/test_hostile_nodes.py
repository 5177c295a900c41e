"""Nodes of the DHT that lie: about the time, about records, about who they are."""

import asyncio

from simulation import Network, close, endpoint_of

from fmoe_ext.remote.dht.clock import NetworkClock
from fmoe_ext.remote.dht.storage import Refusal

TTL = 100.0


def endpoints(records):
    return [record and record.endpoints[0] for record in records]


def test_liar_alone_cannot_move_the_clock():
    async def run():
        network = Network()
        honest = await network.nodes(3)
        liar = await network.node(honest[0])
        liar.node.clock.now = lambda: network.seconds + 3000
        for discovery in (*honest, liar, *honest):
            network.seconds += 60
            await discovery.node.refresh()
        await close([*honest, liar])
        return [d.node.clock.offset for d in honest]

    assert asyncio.run(run()) == [0, 0, 0]


def test_many_nodes_of_one_address_have_one_voice_in_the_clock():
    """Twelve ids of one host moved the clock of three honest nodes by 3,500 s."""

    async def run():
        network = Network()
        honest = await network.nodes(3)
        liars = []
        for _ in range(12):
            liars.append(await network.node(honest[0], address="10.0.0.66"))
            liars[-1].node.clock.now = lambda: network.seconds + 3500
        for _ in range(3):
            network.seconds += 60
            for discovery in honest:
                await discovery.node.refresh()
        known = [len(d.node.table) for d in honest]
        await close([*honest, *liars])
        return known, [d.node.clock.offset for d in honest]

    known, offsets = asyncio.run(run())
    assert min(known) > 10
    assert offsets == [0, 0, 0]


def test_clock_of_a_node_that_has_joined_follows_in_bounded_steps():
    clock = NetworkClock(lambda: 0.0)
    clock.is_joining = True
    clock.hear("a", 50.0, 0.0, 0.0)
    assert clock.offset == 50.0
    clock.is_joining = False
    for n in range(40):
        clock.hear(f"liar{n}", 3500.0, 10.0, 10.0)
    assert clock.offset == 50.0  # no time has passed since the first of them
    clock.hear("liar", 8500.0, 5000.0, 5000.0)
    assert clock.offset == 110.0  # a pause counts as a minute at most


class Repeater:
    """A node that answers every search with its own claim, twenty times, and keeps nobody else's."""

    def __init__(self, discovery, signed):
        discovery.node.store.find = lambda key, now: [signed] * 20
        discovery.node.store.put = lambda key, record, now: Refusal("mine", signed)


def test_node_that_repeats_its_record_has_one_vote():
    """Votes were counted by record: every reader believed the node, and the owner lost its uid."""

    async def run():
        network = Network(seed=9)
        nodes = await network.nodes(6)
        granted = await nodes[1].declare(["expert.0"], "owner:1", TTL)
        liar = await network.node(nodes[0])
        Repeater(liar, liar.identity.sign("expert.0", "evil:1", 1, 1, network.seconds + TTL))
        again = await nodes[1].declare(["expert.0"], "owner:1", TTL)
        answers = [endpoints(await d.get(["expert.0"])) for d in nodes]
        await close([*nodes, liar])
        return granted, again, answers

    granted, again, answers = asyncio.run(run())
    assert granted == again == {"expert.0"}
    assert answers == [["owner:1"]] * 6


def test_node_with_the_key_of_another_is_not_believed():
    """An id follows from a key that the node holds: an answer of another node, or of another request, is refused."""

    async def run():
        network = Network(seed=10)
        nodes = await network.nodes(3)
        victim, thief = nodes[1], nodes[2]
        thief.node.node_id = victim.node.node_id  # answers by the id of another
        stolen = await nodes[0].node.ping(endpoint_of(thief), 1)
        recorded = []
        answer = victim.node.handle

        async def replay(method, data, host):
            recorded.append(await answer(method, data, host))
            return recorded[0]

        network.handlers[endpoint_of(victim)] = replay
        first, second = [await nodes[0].node.ping(endpoint_of(victim), 1) for _ in range(2)]
        await close(nodes)
        return stolen, first, second, victim.node.node_id

    stolen, first, second, node_id = asyncio.run(run())
    assert (stolen, first.node_id, second) == (None, node_id, None)
