"""Nodes of the DHT that lie: about the time, about records, about who they are."""

import json
from dataclasses import replace

import pytest
import simulation
import torch
from simulation import Network, close, endpoint_of

from fmoe_ext.remote.beam_search import beam_search
from fmoe_ext.remote.dht import messages, storage
from fmoe_ext.remote.dht.messages import Answer, Found, Header
from fmoe_ext.remote.dht.node import NetworkClock
from fmoe_ext.remote.dht.records import Identity, prefix_key, uid_key
from fmoe_ext.remote.dht.storage import Peer, RecordStore, Refusal

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

    assert simulation.run(run()) == [0, 0, 0]


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

    known, offsets = simulation.run(run())
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

    granted, again, answers = simulation.run(run())
    assert granted == again == {"expert.0"}
    assert answers == [["owner:1"]] * 6


@pytest.mark.parametrize("seconds", [31, 59, 1e9])
def test_record_of_the_future_keeps_nobody_from_a_claim(seconds, caplog):
    """A new claim had to be younger than it, so that every honest node refused the claim."""

    async def run():
        network = Network(seed=13)
        nodes = await network.nodes(5)
        late = await network.node(nodes[0], skew=-20.0)
        late.node.clock.offset = 0.0  # its time is behind the others'
        liar = await network.node(nodes[0])
        fence = int((network.seconds + seconds) * 1000)
        signed = liar.identity.sign("expert.0", "", fence, 1, network.seconds + TTL)
        liar.node.store.find = lambda key, now: [signed]
        granted = await nodes[1].declare(["expert.0"], "owner:1", TTL)
        kept = [len(d.node.store.find(uid_key("expert.0"), network.seconds)) for d in (*nodes, late)]
        await close([*nodes, late, liar])
        return granted, kept, liar.identity.public

    granted, kept, owner = simulation.run(run())
    assert granted == {"expert.0"} and kept == [1] * 6
    assert f"expert.0: a record of {owner} is refused, for it was claimed {seconds:.0f} s" in caplog.text


@pytest.fixture
def room_for_eight(monkeypatch):
    for module in ("storage", "discovery"):
        monkeypatch.setattr(f"fmoe_ext.remote.dht.{module}.MAX_UNDER_PREFIX", 8)


def test_key_with_many_claims_leaves_each_other_key_its_share_of_a_prefix(room_for_eight):
    """New experts were granted and found by name, but no beam search saw them."""

    async def run():
        network = Network(seed=11)
        nodes = await network.nodes(5)
        crowd = await nodes[0].declare([f"expert.{n}" for n in range(12)], "crowd:1", TTL)
        mine = ["expert.20", "expert.21", "expert.22"]
        granted = await nodes[1].declare(mine, "owner:1", TTL)
        seen = [await d.successors(["expert"]) for d in nodes]
        beam = await beam_search(nodes[2], "expert", [torch.arange(30.0).reshape(1, 30)], 3)
        again = await nodes[0].declare([f"expert.{n}" for n in range(12)], "crowd:1", TTL)
        await close(nodes)
        return crowd, granted, seen, beam, again

    crowd, granted, seen, beam, again = simulation.run(run())
    assert granted.found_at == {"expert.20": 5, "expert.21": 5, "expert.22": 5}
    assert all({20, 21, 22} < found["expert"] and len(found["expert"]) == 8 for found in seen)
    assert [record.uid for record in beam.records] == ["expert.20", "expert.21", "expert.22"]
    assert [sorted(claims.found_at.values()) for claims in (crowd, again)] == [
        [0] * 4 + [5] * 8,
        [0] * 7 + [5] * 5,
    ]


def test_claims_that_one_node_makes_up_leave_the_others_their_share_of_a_search(room_for_eight):
    async def run():
        network = Network(seed=12)
        nodes = await network.nodes(5)
        await nodes[1].declare(["expert.20", "expert.21"], "owner:1", TTL)
        liar = await network.node(nodes[0])
        made_up = [
            liar.identity.sign(f"expert.{n}", "evil:1", 1, 1, network.seconds + TTL) for n in range(20)
        ]
        liar.node.store.find = lambda key, now: made_up
        found = await nodes[3].successors(["expert"])
        await close([*nodes, liar])
        return found["expert"]

    found = simulation.run(run())
    assert {20, 21} < found and len(found) == 8


def test_answer_about_a_prefix_has_room_for_the_largest_records():
    """Records of 2,048 characters made an answer that nobody takes, so that a prefix could not be read."""
    store, crowd, one = RecordStore(), Identity(bytes(32)), Identity(bytes([1]) * 32)
    metadata = {str(n): "\\" * 200 for n in range(4)}
    claims = [
        crowd.sign(f"expert.{n}", "a:1", 1, 1, 150.0, metadata) for n in range(storage.MAX_UNDER_PREFIX)
    ]
    for claim in [*claims[:-1], one.sign("expert.9999", "b:1", 1, 1, 150.0)]:
        assert store.put(prefix_key("expert"), claim, 100.0) is None
    found = store.find(prefix_key("expert"), 100.0)
    answer = messages.encode_answer(Answer(Header(1, 100.0), {1: Found((), found)}))
    assert 4 << 20 < len(answer) < messages.MAX_ANSWER_BYTES - messages.FULL_ANSWER_BYTES
    assert "expert.9999" in {record.uid for record in found}


@pytest.mark.parametrize("changes", [{"metadata": {"a": "\ud800"}}, {"expires": 10**400}])
def test_record_that_cannot_be_read_ends_no_search(changes):
    """Searches that asked the node that sent it ended in a UnicodeEncodeError or an OverflowError."""

    async def run():
        network = Network()
        nodes = await network.nodes(3)
        await nodes[0].declare(["expert.1"], "a:1", TTL)
        liar = await network.node(nodes[0])
        bad = Identity().sign("expert.1", "b:1", 1, 1, network.seconds + TTL)
        bad = replace(bad, payload=json.dumps(json.loads(bad.payload) | changes, ensure_ascii=False))
        liar.node.store.find = lambda key, now: [bad]
        found = await nodes[1].get(["expert.1"])
        await close([*nodes, liar])
        return endpoints(found)

    assert simulation.run(run()) == ["a:1"]


def test_node_with_the_key_of_another_is_not_believed():
    """An id follows from a key that the node holds: an answer of another node, or of another request, is refused."""

    async def run():
        network = Network(seed=10)
        nodes = await network.nodes(3)
        victim, thief = nodes[1], nodes[2]
        thief.node.node_id = victim.node.node_id  # answers by the id of another
        stolen = await nodes[0].node.ping(Peer(-1, endpoint_of(thief)), 1)
        recorded = []
        answer = victim.node.handle

        async def replay(method, data, host):
            recorded.append(await answer(method, data, host))
            return recorded[0]

        network.handlers[endpoint_of(victim)] = replay
        first, second = [await nodes[0].node.ping(Peer(-1, endpoint_of(victim)), 1) for _ in range(2)]
        await close(nodes)
        return stolen, first, second, victim.node.node_id

    stolen, first, second, node_id = simulation.run(run())
    assert (stolen, first.node_id, second) == (None, node_id, None)
