"""Many nodes in one process: hops, churn, islands, clocks, claims, and beam search against brute force."""

import asyncio
import contextlib
import itertools
import math
import random

import pytest
import simulation
import torch
from simulation import Network, close, endpoint_of

from fmoe_ext.remote.beam_search import beam_search
from fmoe_ext.remote.dht.records import places_of, uid_key
from fmoe_ext.remote.discovery import Cached, DiscoveryError, StaticList, Unanswered

TTL = 100.0


def endpoints(records):
    return [record and record.endpoints[0] for record in records]


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@pytest.mark.parametrize("num_nodes", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_lookups_take_log_n_hops_under_churn(num_nodes):
    async def run():
        network = Network(seed=1)
        nodes = await network.nodes(num_nodes)
        uids = [f"expert.{n}" for n in range(64)]
        for n, uid in enumerate(uids):  # declared by nodes that live on
            assert await nodes[n % 20].declare([uid], f"host{n}:1", TTL) == {uid}
        dead, alive = nodes[20:], nodes[:20]
        network.rng.shuffle(dead)
        num_dead = int(0.3 * num_nodes)
        dead, alive = dead[:num_dead], alive + dead[num_dead:]
        for discovery in dead:
            network.kill(discovery)
        before = network.num_calls
        hops, num_nearest = [], 0
        for n in range(200):
            if n < num_dead:  # as many come as went, while others search
                alive.append(await network.node(network.rng.choice(alive)))
            asking = network.rng.choice(alive)
            key = uid_key(network.rng.choice(uids))
            nearby = (await asking.node.find([key], 60))[key]
            hops.append(nearby.hops)
            true = min(alive, key=lambda d: d.node.node_id ^ key)
            reached = nearby.holders[0].peer
            num_nearest += (reached.node_id if reached else asking.node.node_id) == true.node.node_id
        found = await network.rng.choice(alive).get(uids, timeout=60)
        assert endpoints(found) == [f"host{n}:1" for n in range(64)]
        calls = (network.num_calls - before) / 200
        await close(nodes + alive)
        return hops, calls, num_nearest

    hops, calls, num_nearest = simulation.run(run())
    p50, p99 = percentile(hops, 0.5), percentile(hops, 0.99)
    print(
        f"{num_nodes} nodes, 30 % churn: hops p50 {p50} p99 {p99}, {calls:.0f} calls a lookup and its share of joins"
    )
    # a node that has just come may still wait behind the dead in its neighbours' full buckets
    assert num_nearest >= 0.95 * len(hops)
    assert p99 <= math.ceil(math.log2(num_nodes))
    assert calls < 150


def test_lookup_of_many_keys_calls_each_node_once():
    """A node was called for one key after the other: 31 calls for 16 keys at ten nodes."""

    async def run():
        network = Network(seed=4)
        nodes = await network.nodes(10)
        uids = [f"expert.{n}" for n in range(16)]
        await nodes[0].declare(uids, "a:1", TTL)
        client = await network.node(nodes[0], listen=False)
        before = network.num_calls
        found = endpoints(await client.get(uids))
        calls = network.num_calls - before
        await close([*nodes, client])
        return found, calls

    found, calls = simulation.run(run())
    assert found == ["a:1"] * 16
    assert calls <= 10


def test_simulation_is_the_same_every_time():
    async def run():
        network = Network(seed=3)
        nodes = await network.nodes(20)
        await nodes[3].declare(["expert.0"], "a:1", TTL)
        await close(nodes)
        return network.num_calls, [len(d.node.table) for d in nodes], [len(d.node.store) for d in nodes]

    assert simulation.run(run()) == simulation.run(run())


def test_two_islands_become_one_when_one_node_learns_of_the_other():
    async def run():
        network = Network(seed=2)
        east, west = await network.nodes(12), await network.nodes(12)
        await east[5].declare(["expert.0", "expert.1"], "east:1", TTL)
        network.seconds += 1
        await west[5].declare(["expert.1", "expert.2"], "west:1", TTL)
        assert endpoints(await west[1].get(["expert.0"])) == [None]
        await east[3].node.join([endpoint_of(west[7])], 1)
        for _ in range(2):
            for discovery in (*east, *west):
                await discovery.node.refresh()
        assert all(len(d.node.table) == 23 for d in (*east, *west))
        got = [await d.declare(u, e, TTL) for d, u, e in _claims(east, west)]
        again = [await d.declare(u, e, TTL) for d, u, e in _claims(east, west)]
        answers = [endpoints(await d.get(["expert.0", "expert.1", "expert.2"])) for d in (*east, *west)]
        await close(east + west)
        return got, again, answers

    def _claims(east, west):
        return (east[5], ["expert.0", "expert.1"], "east:1"), (west[5], ["expert.1", "expert.2"], "west:1")

    got, again, answers = simulation.run(run())
    owners = {"east:1" if "expert.1" in again[0] else "west:1"}
    assert sum("expert.1" in granted for granted in again) == 1, (got, again)
    assert "expert.0" in again[0] and "expert.2" in again[1]
    assert {tuple(a) for a in answers} == {("east:1", owners.pop(), "west:1")}


@pytest.mark.parametrize("seed", range(5))
def test_of_two_claims_at_the_same_moment_one_holds(seed):
    async def run():
        network = Network(seed)
        nodes = await network.nodes(2 + 3 * seed)
        claims = [nodes[n].declare(["expert.0"], f"host{n}:1", TTL) for n in (0, 1)]
        await asyncio.gather(*claims)
        granted = [await nodes[n].declare(["expert.0"], f"host{n}:1", TTL) for n in (0, 1)]
        answers = [endpoints(await d.get(["expert.0"])) for d in nodes]
        await close(nodes)
        return granted, answers

    granted, answers = simulation.run(run())
    assert sorted(map(len, granted)) == [0, 1]
    owner = "host0:1" if granted[0] else "host1:1"
    assert answers == [[owner]] * len(answers)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_servers_with_one_key_the_later_one_gives_up_at_its_renewal(first, caplog):
    """Both were granted the uid for as long as they lived."""

    async def run():
        network = Network(seed=7)
        nodes = await network.nodes(6)
        nodes[1].identity = nodes[0].identity  # on another machine, where no lock is seen
        servers = [(nodes[n], ["expert.0"], f"host{n}:1", 30.0) for n in (first, 1 - first)]
        granted = []
        for _ in range(4):
            now = []
            for discovery, *claim in servers:
                network.seconds += 5
                now.append(bool(await discovery.declare(*claim)))
            granted.append(now)
        answers = endpoints(await nodes[4].get(["expert.0"]))
        network.kill(servers[0][0])
        network.seconds += 31  # the earlier one has died
        granted.append(bool(await servers[1][0].declare(*servers[1][1:])))
        await close(nodes)
        return granted, answers

    granted, answers = simulation.run(run())
    assert granted == [[True, True], *[[True, False]] * 3, True]
    assert answers == [f"host{first}:1"]
    texts = [record.message for record in caplog.records if "two servers have one identity" in record.message]
    assert len(texts) == 2
    assert f"claimed at host{first}:1, by the one that began earlier and keeps it" in texts[1]


def test_server_that_died_and_starts_again_has_its_uids_at_once():
    async def run():
        network = Network(seed=7)
        nodes = await network.nodes(4)
        await nodes[0].declare(["expert.0"], "before:1", 30.0)
        network.kill(nodes[0])
        network.seconds += 5
        again = await network.node(nodes[1])
        again.identity = nodes[0].identity
        granted = []
        for _ in range(3):
            granted.append(await again.declare(["expert.0"], "after:1", 30.0))
            network.seconds += 10
        await close([*nodes, again])
        return granted

    assert simulation.run(run()) == [{"expert.0"}] * 3


@pytest.mark.parametrize("skews", [(0, 600), (0, 0, 900, 0), (-300, 0, 0, 500, 0)])
def test_wrong_clocks_neither_kill_records_nor_keep_them_alive(skews):
    async def run():
        network = Network(seed=5)
        nodes = [await network.node(skew=skews[0])]
        nodes += [await network.node(nodes[0], skew=skew) for skew in skews[1:]]
        for _ in range(3):
            for discovery in nodes:
                await discovery.node.refresh()
        offsets = [network.seconds - d.node.clock.now() for d in nodes]
        assert max(offsets) - min(offsets) < 1
        for n, discovery in enumerate(nodes):
            assert await discovery.declare([f"expert.{n}"], f"host{n}:1", 30.0)
        uids = [f"expert.{n}" for n in range(len(nodes))]
        at_once = [endpoints(await d.get(uids)) for d in nodes]
        left = [(await d.get(uids))[0].expires - asyncio.get_running_loop().time() for d in nodes]
        network.seconds += 31
        late = [endpoints(await d.get(uids)) for d in nodes]
        await close(nodes)
        return at_once, left, late

    at_once, left, late = simulation.run(run())
    assert at_once == [[f"host{n}:1" for n in range(len(skews))]] * len(skews)
    assert late == [[None] * len(skews)] * len(skews)
    assert all(29 < seconds <= 30.5 for seconds in left)  # whatever the clock of who asks


def test_slow_nodes_have_one_timeout_for_all_items():
    """Each 64 items had a timeout of their own, so that declaring many experts took several times its own."""

    async def run():
        network = Network()
        nodes = await network.nodes(3)
        loop = asyncio.get_running_loop()

        def slow(answer):
            async def handle(method, data, host):
                await asyncio.sleep(0.7 if method == "Store" else 0)
                return await answer(method, data, host)

            return handle

        for endpoint, answer in list(network.handlers.items()):
            network.handlers[endpoint] = slow(answer)
        begin = loop.time()
        uids = [f"expert.{n}" for n in range(400)]  # 800 items a node, 13 calls
        with contextlib.suppress(DiscoveryError):
            await nodes[0].declare(uids, "a:1", 60.0, timeout=2.0)
        seconds = loop.time() - begin
        await close(nodes)
        return seconds

    assert simulation.run(run()) < 4.0  # 2 s, and two calls that the simulation lets run to their ends


async def replay(network, nodes, signed):
    """Stores old records again at every node, as a node that kept their bytes can."""
    for discovery in nodes:
        for record in signed:
            for key in places_of(record.uid):
                discovery.node.store.put(key, record, network.seconds)


@pytest.mark.parametrize("seed", [1, 2])
def test_replayed_records_of_earlier_starts_never_win_while_nodes_come_and_go(seed):
    async def run():
        network = Network(seed=seed)
        nodes, old, wrong, num_found = await network.nodes(16), [], [], 0
        owner = nodes[0]
        uids = [f"expert.{n}" for n in range(4)]
        for start in range(5):  # of a server that dies and comes back at another endpoint
            endpoint = f"start{start}:1"
            calls = [owner.declare(uids, endpoint, 600.0, timeout=30)]
            for _ in range(3):  # nodes die and join while it declares
                network.kill(nodes.pop(network.rng.randrange(1, len(nodes))))
            calls += [network.node(network.rng.choice(nodes)) for _ in range(3)]
            granted, *new = await asyncio.gather(*calls)
            nodes += new
            assert granted == set(uids)
            await replay(network, nodes, old)
            for _ in range(6):
                asking = network.rng.choice(nodes)
                records, places, _ = await asyncio.gather(
                    asking.get(uids, timeout=30),
                    asking.successors(["expert"], timeout=30),
                    replay(network, nodes, old),
                )
                num_found += len(places["expert"])
                wrong += [r and r.endpoints for r in records if r is None or r.endpoints != (endpoint,)]
            old += list(owner._declared.values())
            network.kill(owner)
            owner, identity = await network.node(nodes[1]), owner.identity
            owner.identity = identity
            nodes[0] = owner
            network.seconds += 20
        await close(nodes)
        return wrong, num_found

    assert simulation.run(run()) == ([], 5 * 6 * 4)


def test_partition_that_heals_is_one_network_again():
    async def run():
        network = Network(seed=4)
        nodes = await network.nodes(8)
        await nodes[0].declare(["expert.0"], "a:1", TTL)
        network.cut(*nodes[:3])
        for _ in range(3):
            for discovery in nodes:
                await discovery.node.refresh()
        sizes = [len(d.node.table) for d in nodes]
        network.cut()
        for _ in range(3):
            for discovery in nodes:
                await discovery.node.refresh()
        answers = [endpoints(await d.get(["expert.0"])) for d in nodes]
        healed = [len(d.node.table) for d in nodes]
        await close(nodes)
        return sizes, healed, answers

    sizes, healed, answers = simulation.run(run())
    assert max(sizes) < 7 and healed == [7] * 8
    assert answers == [["a:1"]] * 8


def test_node_that_lost_all_others_finds_them_again():
    async def run():
        network = Network(seed=6)
        nodes = await network.nodes(4)
        await nodes[0].declare(["expert.0"], "a:1", TTL)
        client = await network.node(nodes[0], listen=False)
        network.cut(client)
        for _ in range(3):
            await client.node.refresh()
        with pytest.raises(DiscoveryError, match="knows 0 others"):
            await client.get(["expert.0"])
        network.kill(nodes[0])  # the initial peer is gone for ever
        network.cut()
        await client.node.refresh()
        found = endpoints(await client.get(["expert.0"]))
        await close([*nodes, client])
        return found

    assert simulation.run(run()) == ["a:1"]


# ------------------------------------------------------------------ beam search


def brute_force(uids, scores, beam_size):
    """The best of all live experts, for each token."""
    places = {uid: tuple(map(int, uid.split(".")[1:])) for uid in uids}
    for t in range(scores[0].shape[0]):
        total = {
            uid: sum(axis[t, n].item() for axis, n in zip(scores, place, strict=True))
            for uid, place in places.items()
        }
        yield sorted(total, key=total.get, reverse=True)[:beam_size]


@pytest.mark.parametrize("directory", ["static", "dht"])
@pytest.mark.parametrize("seed", range(3))
def test_beam_search_in_three_dimensions_is_brute_force(directory, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    size, beam_size = (3, 4, 5), 60  # as wide as the grid: nothing is pruned
    grid = [f"grid.{i}.{j}.{k}" for i, j, k in itertools.product(*map(range, size))]
    uids = [uid for uid in rng.sample(grid, 17) if not uid.startswith(("grid.1.", "grid.0.2."))]
    scores = [torch.randn(6, n, generator=generator, dtype=torch.float64) for n in size]

    async def run():
        nodes = await Network(seed).nodes(5) if directory == "dht" else [StaticList()]
        for n, uid in enumerate(uids):
            await nodes[n % len(nodes)].declare([uid], "a:1", TTL)
        found = await beam_search(nodes[-1], "grid", scores, beam_size, timeout=60)
        await close(nodes)
        return found

    found = simulation.run(run())
    names = [[found.records[n].uid for n in row if n >= 0] for row in found.topk_idx.tolist()]
    assert names == list(brute_force(uids, scores, beam_size))


@pytest.mark.parametrize("beam_size", [1, 2, 3])
def test_narrow_beam_keeps_the_best_prefixes_of_each_level(beam_size):
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(4, 3, generator=generator) for _ in range(3)]
    uids = ["g.0.1.2", "g.0.1.0", "g.2.2.1", "g.2.0.0", "g.0.0.1"]

    def best(t):
        beam = [()]
        for level in range(3):
            live = {tuple(map(int, uid.split(".")[1:])) for uid in uids}
            longer = {place[: level + 1] for place in live if place[:level] in beam}
            beam = sorted(longer, key=lambda p: -sum(scores[d][t, n].item() for d, n in enumerate(p)))[
                :beam_size
            ]
        return ["g." + ".".join(map(str, place)) for place in beam]

    async def run():
        directory = StaticList({uid: "a:1" for uid in uids})
        return await beam_search(directory, "g", scores, beam_size)

    found = simulation.run(run())
    names = [[found.records[n].uid for n in row if n >= 0] for row in found.topk_idx.tolist()]
    assert names == [best(t) for t in range(4)]


def test_beam_search_of_an_empty_grid_finds_nothing():
    found = simulation.run(beam_search(StaticList(), "grid", [torch.randn(2, 3)] * 3, 4))
    assert found.records == [] and (found.topk_idx == -1).all()


def test_beam_search_without_an_answer_ends_at_its_deadline():
    class Silent(StaticList):
        async def successors(self, prefixes, *, timeout=5.0):
            await asyncio.sleep(timeout)
            raise Unanswered("too late", {}, prefixes)

    async def run():
        begin = asyncio.get_running_loop().time()
        with pytest.raises(DiscoveryError, match=r"grid.*within 0\.5 s: no answer for grid"):
            await beam_search(Silent({"grid.0.0.0": "a:1"}), "grid", [torch.randn(2, 1)] * 3, 2, timeout=0.5)
        assert asyncio.get_running_loop().time() - begin < 20

    asyncio.run(run())


def test_beam_search_that_is_refused_at_once_leaves_the_loop_to_others():
    """It asked again without a pause, so that no other call, and no refresh of the DHT's node, went on meanwhile."""

    class Alone(StaticList):
        async def successors(self, prefixes, *, timeout=5.0):
            raise Unanswered("this node knows no others", {}, prefixes)

    async def run():
        search = asyncio.ensure_future(beam_search(Alone(), "grid", [torch.randn(2, 1)], 2, timeout=0.3))
        turns = 0
        while not search.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(DiscoveryError, match="no answer for grid"):
            await search
        return turns

    assert asyncio.run(run()) > 5


def test_beam_search_past_its_deadline_returns_what_it_found():
    """Keys that answered in time are searched on; the others are named."""

    class Partial(StaticList):
        async def successors(self, prefixes, *, timeout=5.0):
            found = await super().successors([p for p in prefixes if p != "grid.1"])
            if "grid.1" in prefixes:
                await asyncio.sleep(timeout)
                raise Unanswered("too late", found, ["grid.1"])
            return found

        async def get(self, uids, *, timeout=5.0):
            await asyncio.sleep(timeout)
            found = dict(zip(uids, await super().get(uids), strict=True))
            raise Unanswered(
                "too late", {"grid.2.0": found["grid.2.0"]}, [u for u in uids if u != "grid.2.0"]
            )

    async def run():
        directory = Cached(Partial({f"grid.{i}.{j}": "a:1" for i in range(3) for j in range(2)}))
        begin = asyncio.get_running_loop().time()
        found = await beam_search(directory, "grid", [torch.ones(2, 3), torch.ones(2, 2)], 6, timeout=0.6)
        return found, asyncio.get_running_loop().time() - begin

    found, seconds = asyncio.run(run())
    assert [record.uid for record in found.records] == ["grid.2.0"]
    assert found.topk_idx.tolist() == [[0, -1, -1, -1, -1, -1]] * 2
    assert found.missing == ("grid.1", "grid.0.0", "grid.0.1", "grid.2.1")
    assert found.num_asked == 1 + 3 + 4
    assert 0.5 < seconds < 20


def test_dht_lookup_past_its_deadline_says_which_keys_are_missing():
    async def run():
        network = Network(seed=8)
        nodes = await network.nodes(12)
        uids = [f"expert.{n}" for n in range(12)]
        await nodes[0].declare(uids, "a:1", TTL)
        client = await network.node(nodes[0], listen=False)
        slow = {uid_key(uid) for uid in uids[::2]}
        call = client.node.call

        async def call_slowly(peer, method, request, timeout):
            if slow & set(request.keys):
                await asyncio.sleep(60)
            return await call(peer, method, request, timeout)

        client.node.call = call_slowly
        with pytest.raises(Unanswered, match=r"did not answer for \d+ of 12 keys") as raised:
            await client.get(uids, timeout=0.3)
        await close([*nodes, client])
        return uids, raised.value

    uids, error = simulation.run(run())
    assert set(error.missing) >= set(uids[::2])
    assert set(error.found) == set(uids) - set(error.missing)
    assert all(record.endpoints == ("a:1",) for record in error.found.values())
