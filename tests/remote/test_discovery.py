"""Promises of every implementation of Discovery: add a factory, get the tests."""

import time
import types

import pytest
import torch

from fmoe_ext.remote import Client, Directory, ExpertGone, RemoteExpert, Settings, discovery, loop
from fmoe_ext.remote.dht import discovery as dht_discovery
from fmoe_ext.remote.dht import open_node
from fmoe_ext.remote.discovery import (
    Cached,
    DiscoveryError,
    ExpertRecord,
    Granted,
    StaticList,
    check_uid,
    prefixes_of,
)
from fmoe_ext.remote.etcd import client as etcd_client
from fmoe_ext.remote.etcd.client import EtcdDiscovery
from tests import ports
from tests.remote.conftest import wait_until, within


@pytest.fixture(params=["static", "dht", "etcd"])
def pair(ends, request):
    """Two faces of one directory, as two servers see it."""
    if request.param == "static":
        one = StaticList()
        two = one
    elif request.param == "dht":
        one = ends(loop.run(open_node([], ports.endpoint()), 60))
        two = ends(loop.run(open_node([f"127.0.0.1:{one.node.port}"], ports.endpoint()), 60))
    else:
        endpoint = request.getfixturevalue("etcd")
        one, two = ends(EtcdDiscovery(endpoint)), ends(EtcdDiscovery(endpoint))
    return one, two


def run(coroutine):
    return loop.run(coroutine, 60)


def test_declared_experts_are_found(pair):
    one, two = pair
    assert run(one.get(["expert.0"])) == [None]
    assert run(one.declare(["expert.0", "expert.1"], "a:1", 10)) == {"expert.0", "expert.1"}
    found = run(two.get(["expert.1", "expert.2", "expert.0"]))
    assert [r and (r.uid, r.endpoints) for r in found] == [
        ("expert.1", ("a:1",)),
        None,
        ("expert.0", ("a:1",)),
    ]
    assert all(r.is_live() and r.fence > 0 for r in found if r)


def test_claim_outlives_the_lease_of_an_earlier_process_at_its_endpoint(ends, etcd):
    """The expert was gone from that lease's end until the next renewal, free for others to claim."""
    earlier, later = ends(EtcdDiscovery(etcd)), ends(EtcdDiscovery(etcd))
    for one in (earlier, later, later):
        assert run(one.declare(["expert.0"], "a:1", 30)) == {"expert.0"}
    (before,) = run(later.get(["expert.0"]))
    run(earlier.etcd.revoke(earlier._lease))
    (after,) = run(later.get(["expert.0"]))
    assert after is not None and (after.endpoints, after.fence) == (("a:1",), before.fence)
    run(later.withdraw(["expert.0"], "a:1"))
    assert run(later.get(["expert.0"])) == [None]


def test_end_of_a_lease_is_said_and_another_ttl_refused(ends, etcd, caplog):
    """Claims with another ttl had that of the first one; a server that slept too long never learned of it."""
    one = ends(EtcdDiscovery(etcd))
    run(one.declare(["expert.0", "expert.1"], "a:1", 30))
    with pytest.raises(ValueError, match=r"one lease, of 30 s, but ttl is 10: use another EtcdDiscovery"):
        run(one.declare(["expert.2"], "a:1", 10))
    assert not caplog.text
    run(one.etcd.revoke(one._lease))
    assert run(one.declare(["expert.0", "expert.1"], "a:1", 10)) == {"expert.0", "expert.1"}
    assert "the lease of 2 experts has ended" in caplog.text


def test_uid_has_one_owner(pair):
    one, two = pair
    run(one.declare(["expert.0"], "a:1", 10))
    assert run(two.declare(["expert.0", "expert.1"], "b:1", 10)) == {"expert.1"}
    assert run(one.declare(["expert.0"], "a:1", 10)) == {"expert.0"}  # renewed
    assert run(two.get(["expert.0"]))[0].endpoints == ("a:1",)


def test_withdrawn_uids_are_free(pair):
    one, two = pair
    run(one.declare(["expert.0", "expert.1"], "a:1", 10))
    run(two.withdraw(["expert.0"], "b:1"))  # not its own
    assert run(two.get(["expert.0"]))[0] is not None
    first = run(two.get(["expert.0"]))[0].fence
    run(one.withdraw(["expert.0"], "a:1"))
    assert run(two.get(["expert.0"])) == [None]
    assert run(two.declare(["expert.0"], "b:1", 10)) == {"expert.0"}
    record = run(one.get(["expert.0"]))[0]
    assert record.endpoints == ("b:1",)
    assert record.fence >= first


def test_records_expire(pair):
    one, two = pair
    run(one.declare(["expert.0"], "a:1", 1))
    wait_until(lambda: run(two.get(["expert.0"])) == [None], "the record of 1 s expires")
    assert run(two.successors(["expert"])) == {"expert": frozenset()}


def set_clock(monkeypatch, hours):
    clock = types.SimpleNamespace(time=lambda: time.time() + 3600 * hours, monotonic=time.monotonic)
    for module in (discovery, etcd_client, dht_discovery):  # grpc reads the clock too, and takes no other one
        monkeypatch.setattr(module, "time", clock)


def test_clock_set_forward_hides_no_expert(pair, monkeypatch):
    """A client lost every expert that it had looked up."""
    one, two = pair
    cached = Cached(two, max_age=60)
    run(one.declare(["expert.0"], "a:1", 50))
    (before,) = run(cached.get(["expert.0"]))
    set_clock(monkeypatch, 1)
    assert run(cached.get(["expert.0"])) == [before]
    assert run(two.get(["expert.0"]))[0].endpoints == ("a:1",)
    assert 0 < before.expires - time.monotonic() <= 60


def test_clock_set_back_keeps_no_expired_record(pair, monkeypatch):
    one, two = pair
    run(one.declare(["expert.0"], "a:1", 1))
    set_clock(monkeypatch, -1)
    wait_until(lambda: run(two.get(["expert.0"])) == [None], "the record of 1 s expires")


def test_successors(pair):
    one, two = pair
    run(one.declare(["ffn.1.7", "ffn.1.9", "ffn.12.3", "other.2"], "a:1", 10))
    assert run(two.successors(["ffn", "ffn.1", "ffn.2", "other"])) == {
        "ffn": {1, 12},
        "ffn.1": {7, 9},
        "ffn.2": frozenset(),
        "other": {2},
    }


@pytest.mark.parametrize(
    "uid",
    [
        *("", "expert", "expert.", ".1", "expert.01", "expert.-1", "a b.1", "e.99999999999", "e.2147483648"),
        *(
            "../x.1",
            "a/b.1",
            "a\\b.1",
            "a\n.1",
            "a\0.1",
            "e\u0301.1",
            "\ud800.1",
            "ä" * 64 + ".1",
            "e.\u0661",
            3,
        ),
    ],
)
def test_bad_uids_are_refused(pair, uid):
    with pytest.raises(ValueError, match="expert"):
        run(pair[0].get([uid]))


@pytest.mark.parametrize(
    "uid", ["ffn.5.17", "my::experts.3", "4you.1", "größe.2", "専門家.0.1", "a-b_c.2147483647"]
)
def test_uids_of_hivemind_are_found(ends, pair, uid):
    """Prefixes were ASCII words that begin with a letter."""
    one, two = pair
    prefix = uid.partition(".")[0]
    assert run(one.declare([uid], "a:1", 10)) == {uid}
    assert run(two.get([uid]))[0].endpoints == ("a:1",)
    assert run(two.successors([prefix + "."])) == {prefix + ".": {int(uid.split(".")[1])}}
    directory = Directory(two)
    ends(directory.client)
    known, *others = directory.get_experts([uid, "no name", "expert", "", uid + ".5", None])
    assert known.uid == uid and others == [None] * 5


def test_uids_of_any_alphabet_are_served_and_saved(serve, tmp_path):
    options = {"expert_uids": ("größe::2.7",), "checkpoint_dir": tmp_path}
    server, directory = serve(**options)
    (expert,) = directory.get_experts(["größe::2.7"])
    expert(torch.ones(2, 16)).sum().backward()
    loop.run(server.save(), 60)
    assert server.checkpoints.uids() == ["größe::2.7"]
    assert server.checkpoints.load("größe::2.7").meta["version"] == "1"


def test_uids_and_prefixes():
    assert check_uid("grid.0.31") == "grid.0.31"
    assert prefixes_of("grid.1.7") == [("grid", 1), ("grid.1", 7)]


def test_cached_answers_that_are_forgotten_meanwhile_are_still_given():
    """A KeyError ended a call that asked for several experts while another one's call had failed."""

    class Slow(StaticList):
        async def get(self, uids, *, timeout=5.0):
            if "expert.1" in uids:
                cached.forget(["expert.0"])  # as Client does after a failure
            return await super().get(uids)

    cached = Cached(Slow({"expert.0": "a:1", "expert.1": "b:1"}))
    run(cached.get(["expert.0"]))
    found = run(cached.get(["expert.1", "expert.0", "expert.1"]))
    assert [record.endpoints for record in found] == [("b:1",), ("a:1",), ("b:1",)]


def test_etcd_that_does_not_answer_costs_no_more_than_the_timeout(ends):
    nowhere = ends(EtcdDiscovery("127.0.0.1:1"))
    with within(20), pytest.raises(DiscoveryError, match=r"127\.0\.0\.1:1"):
        loop.run(nowhere.get(["expert.0"], timeout=0.5), 60)


def test_slow_etcd_has_one_timeout_for_all_uids(monkeypatch):
    """Each uid that was withdrawn had the whole timeout, and so had a lease that replaces one that ended."""
    now, ends_at = [0.0], []

    class Slow:
        async def answer(self, timeout, result):
            ends_at.append(now[0] + timeout)
            now[0] += 0.5
            return result

        async def keep_alive(self, lease, timeout):
            return await self.answer(timeout, False)

        async def grant(self, ttl, timeout):
            return await self.answer(timeout, 7)

        async def transact(self, compare=(), success=(), failure=(), timeout=5.0):
            return await self.answer(timeout, etcd_client.Answer(True, 1, []))

    monkeypatch.setattr(etcd_client, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    directory = EtcdDiscovery("127.0.0.1:1")
    directory.etcd, directory._lease = Slow(), 5
    run(directory.declare(["expert.0", "expert.1"], "a:1", 10.0, timeout=4.0))
    assert ends_at == [4.0] * 4
    ends_at.clear()
    run(directory.withdraw(["expert.0", "expert.1"], "a:1", timeout=2.0))
    assert ends_at == [4.0, 4.0]  # 2 s from the 2 s that declare() took


def test_owner_keeps_its_experts_when_strangers_claim_them(ends, serve, tmp_path, caplog):
    """The trained expert was deleted as soon as the directory named another owner."""
    discovery = StaticList()
    options = {"ttl": 0.3, "checkpoint_dir": tmp_path, "expert_uids": ("expert.0",)}
    server, directory = serve(Settings(patience=0.0), discovery=discovery, **options)
    (expert,) = directory.get_experts(["expert.0"])
    x = torch.ones(2, 16)
    expert(x).sum().backward()
    learned = expert(x)
    own = RemoteExpert("expert.0", server.endpoint, ends(Client(settings=Settings(patience=0.0))))

    discovery._records["expert.0"] = ExpertRecord("expert.0", ("127.0.0.1:1",))  # the claim of a stranger
    wait_until(lambda: server.service.withheld == {"expert.0"})
    assert server.host.experts["expert.0"].version == 1
    with pytest.raises(ExpertGone, match="belongs to another server now: it is kept here, but not served"):
        own(x)
    with pytest.raises(ExpertGone, match="kept here"):
        own.schema()
    assert "another server claims expert.0: it is kept here at version 1" in caplog.text
    wait_until(lambda: server.checkpoints.load("expert.0") is not None)
    assert server.metrics.count("experts_lost_total") == 1
    assert server.status()["experts"][0]["withheld"]

    del discovery._records["expert.0"]
    wait_until(lambda: not server.service.withheld)
    assert torch.equal(own(x), learned)
    own(x).sum().backward()
    assert server.host.experts["expert.0"].version == 2


def test_server_says_which_of_its_experts_no_search_finds(serve, caplog):
    """declare() returned success for experts that the mixture never chose."""

    class Crowded(StaticList):
        async def declare(self, uids, endpoint, ttl, **options):
            granted = Granted(await super().declare(uids, endpoint, ttl, **options))
            granted.found_at = {uid: 0 if uid == "expert.1" else 5 for uid in granted}
            return granted

    server, _ = serve(discovery=Crowded())
    assert "no mixture finds expert.1: the DHT's nodes have no room" in caplog.text
    assert "fmoe_remote_hidden_experts 1" in server.metrics.to_text()
