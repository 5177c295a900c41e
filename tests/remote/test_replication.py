"""Experts that outlive servers: no update lost, none applied twice."""

import asyncio
import dataclasses
import time
import types

import pytest
import torch
from dying import kill

from fmoe_ext.remote import (
    CallTimeout,
    Client,
    ExpertGone,
    NoLeader,
    Options,
    RemoteError,
    RemoteExpert,
    Server,
    Training,
    discovery,
    loop,
)
from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd import client as etcd_client
from fmoe_ext.remote.etcd.client import EtcdDiscovery
from fmoe_ext.remote.replication.follower import Role
from fmoe_ext.remote.replication.messages import Append, Sender
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.server.ledger import End, Term
from fmoe_ext.remote.server.options import Replication
from tests import ports
from tests.remote.conftest import LONG, PATIENT, wait_until, within

D, UID = 16, "expert.0"
PROBE = Append(UID, Term(1, "a"), 0, End())


@pytest.fixture
def cluster(ends, etcd):
    def add(uids=(UID,), ttl=6.0, replicas=2, **options):
        given = {"hidden_dim": D, "expert_uids": uids, "num_experts": 0, "listen_on": ports.endpoint()}
        given["training"] = Training("sgd", lr=0.05)
        placement = ReplicatedExperts(Replication(etcd, replicas, ttl, ack_timeout=5.0, recovery_wait=3.0))
        return ends(Server(Options(**{**given, **options}), placement).start())

    add.endpoint = etcd
    return add


@pytest.fixture
def client(ends, etcd):
    discovery = ends(EtcdDiscovery(etcd))
    return ends(Client(discovery, dataclasses.replace(PATIENT, patience=LONG)))


def role(server, uid=UID):
    return server.placement.replicas[uid].role if uid in server.placement.replicas else None


def members(server, uid=UID):
    found, _ = server.placement.registry.view.members(uid)
    return set() if found is None else set(found.endpoints)


def pair_up(*servers):
    wait_until(lambda: len(members(servers[0])) == 2, "two members")
    wait_until(lambda: sorted(role(s).value for s in servers if role(s)).count("follower") == 1, "a follower")
    leader = next(s for s in servers if role(s) is Role.LEADER)
    return leader, next(s for s in servers if role(s) is Role.FOLLOWER)


def step(client, number=1, uid=UID):
    expert = RemoteExpert(uid, client=client)
    torch.manual_seed(number)
    x = torch.randn(4, D, requires_grad=True)
    expert(x).pow(2).sum().backward()
    return x.grad


def state_of(server, uid=UID):
    read = server.compute.call(lambda: (server.host.find(uid).version, server.host.digest(uid)))
    return read.result(60)


@pytest.mark.parametrize("has_lease", [True, False])
def test_error_of_one_expert_keeps_no_other_from_its_look(has_lease, caplog):
    """Except that a silent etcd, after which the lease is over, is not waited for once an expert."""
    placement, looked, leases = ReplicatedExperts(Replication("a:1", 1, 6.0)), [], [True]
    placement.server = types.SimpleNamespace(
        endpoint="b:1", options=types.SimpleNamespace(expert_cls="ffn", hidden_dim=D)
    )

    async def announce(entry):
        pass

    async def look_at(replica):
        looked.append(replica.uid)
        if replica.uid != "expert.2":
            leases[0] = has_lease
            raise DiscoveryError(f"etcd refuses the record of {replica.uid}")

    placement.registry.announce, placement._look_at = announce, look_at
    placement.registry.has_lease = lambda: leases[0]
    placement.replicas = {f"expert.{n}": types.SimpleNamespace(uid=f"expert.{n}") for n in range(3)}
    with pytest.raises(DiscoveryError, match=r"record of expert\.0"):
        loop.run(placement._reconcile(), 60)
    assert looked == (["expert.0", "expert.1", "expert.2"] if has_lease else ["expert.0"])
    assert ("record of expert.1" in caplog.text) == has_lease
    loop.run(placement.registry.store.close(), 60)


def test_every_replica_has_every_update(cluster, client):
    leader, follower = pair_up(cluster(), cluster())
    for n in range(60):  # beyond the update whose digest is compared
        step(client, n)
    wait_until(lambda: state_of(follower) == state_of(leader), "equal replicas")
    assert state_of(leader)[0] == 60
    assert follower.metrics.count("divergences_total") == 0


def test_leader_dies_and_nothing_is_lost(cluster, client):
    leader, follower = pair_up(cluster(ttl=2.0), cluster(ttl=2.0))
    for n in range(5):
        step(client, n)
    kill(leader)
    with within(40):
        step(client, 5)  # waits for the next leader
    assert role(follower) is Role.LEADER
    assert state_of(follower)[0] == 6
    third = cluster(uids=())
    wait_until(lambda: role(third) is Role.FOLLOWER, "another replica")
    step(client, 6)
    wait_until(lambda: state_of(third) == state_of(follower), "equal replicas")
    assert state_of(third)[0] == 7


def test_hand_over_at_stop_takes_no_lease_time(cluster, client):
    leader, follower = pair_up(cluster(ttl=30.0), cluster(ttl=30.0))
    step(client)
    with within(20):
        leader.stop()
        wait_until(lambda: role(follower) is Role.LEADER, "the follower leads")
        step(client)
    assert state_of(follower)[0] == 2


def test_follower_that_dies_stops_no_update(cluster, client):
    leader, follower = pair_up(cluster(), cluster())
    kill(follower)
    with within(40):
        step(client)
    assert members(leader) == {leader.placement.name}


def test_repeated_request_is_applied_once_also_by_the_next_leader(cluster, client):
    leader, follower = pair_up(cluster(), cluster())
    handle = client.handle(UID)
    x, grad = torch.randn(3, D), torch.randn(3, D)
    sent = []
    call = client.caller.call

    async def remember(endpoint, method, data, timeout):
        if method.endswith("Backward"):
            sent.append(data)
        return await call(endpoint, method, data, timeout)

    client.caller.call = remember
    first = loop.run(client.backward(handle, (x,), grad, 0, 5.0), 60)
    again = loop.run(call(leader.endpoint, "/fmoe.Experts/Backward", sent[0], 5.0), 60)
    assert torch.equal(again.tensors["0"], first.tensors[0])
    leader.stop()
    wait_until(lambda: role(follower) is Role.LEADER, "the follower leads")
    after = loop.run(call(follower.endpoint, "/fmoe.Experts/Backward", sent[0], 5.0), 60)
    assert torch.equal(after.tensors["0"], first.tensors[0])
    assert state_of(follower)[0] == 1


def test_leader_cut_off_acknowledges_nothing(ends, cluster, client):
    """It still believes to lead: no update of its is acknowledged, and it takes a copy when the next one calls it."""
    leader, follower = pair_up(cluster(), cluster())
    step(client, 0)
    registry = leader.placement.registry

    def unreachable(append):
        raise ValueError("no way from the new leader to the old one")

    async def cut_off():
        leader.placement.replicas[UID].receive = unreachable
        for task in (leader.placement._task, *registry._tasks):
            task.cancel()
        registry._lease_ends = time.monotonic() + 1000  # a clock that stands still

    loop.run(cut_off(), 60)
    wait_until(lambda: role(follower) is Role.LEADER, "the follower leads")
    assert role(leader) is Role.LEADER  # so it thinks
    impatient = ends(Client(settings=dataclasses.replace(PATIENT, backward_timeout=12, patience=0)))
    old = RemoteExpert(UID, leader.endpoint, impatient)
    y = old(torch.randn(2, D))
    with pytest.raises(RemoteError, match="not the leader"):
        y.sum().backward()
    assert role(leader) is not Role.LEADER
    step(client, 1)
    assert state_of(follower)[0] == 2


def test_update_under_way_when_its_sender_stops_is_settled():
    """Otherwise its commit, and every change of the members after it, would wait for ever."""

    class Silent:
        async def call(self, *_):
            await asyncio.sleep(1000)

    async def stop_under_way():
        sender = Sender(Silent(), "server", "host:1", 1000.0)
        first, second = sender.put(PROBE), sender.put(PROBE)
        await asyncio.sleep(0.01)
        sender.stop()
        return await asyncio.gather(first, second)

    assert loop.run(stop_under_way(), 60) == [None, None]


def test_follower_whose_ready_answer_is_lost_becomes_one(cluster, client):
    """The leader's word that it is a member now was lost: it takes another copy, without waiting for an update."""
    leader = cluster()
    step(client)
    follower, lost = cluster(uids=()), []
    call = follower.placement.peers.call

    async def lose_one(endpoint, method, data, timeout):
        answer = await call(endpoint, method, data, timeout)
        if method.endswith("Ready") and not lost:
            lost.append(answer)
            raise CallTimeout("lost")
        return answer

    follower.placement.peers.call = lose_one
    wait_until(lambda: lost and role(follower) is Role.FOLLOWER, "a follower")
    wait_until(lambda: len(members(leader)) == 2, "two members")
    assert state_of(follower) == state_of(leader)


def test_calls_that_come_again_late_leave_a_member_a_member(cluster, client):
    """The very calls that made it one: were it not waited for any more, it could lead later without what it missed."""
    leader, sent = cluster(), []
    step(client)
    follower = cluster(uids=())
    call = follower.placement.peers.call

    async def remember(endpoint, method, data, timeout):
        sent.append((endpoint, method, data, timeout))
        return await call(endpoint, method, data, timeout)

    follower.placement.peers.call = remember
    wait_until(lambda: role(follower) is Role.FOLLOWER and len(members(leader)) == 2, "a follower")
    (sender,) = leader.placement.replicas[UID].leader.senders.values()
    ready = next(s for s in sent if s[1].endswith("Ready"))
    loop.run(call(*ready), 60)
    assert follower.placement.name in leader.placement.replicas[UID].leader.needed
    step(client)
    wait_until(lambda: state_of(follower) == state_of(leader), "equal replicas")


def test_member_that_was_removed_answers_no_forward(ends, cluster, client):
    """Its weights are older, and a client that only infers cannot know."""
    leader, follower = pair_up(cluster(), cluster())
    step(client)
    x = torch.randn(2, D)
    impatient = ends(Client(settings=dataclasses.replace(PATIENT, forward_timeout=1.0)))
    read = RemoteExpert(UID, follower.endpoint, impatient)
    assert torch.equal(read(x), RemoteExpert(UID, leader.endpoint, client)(x))

    async def fail(*_):
        raise ExpertGone("it takes no copy")

    follower.placement.peers.download = fail
    (sender,) = leader.placement.replicas[UID].leader.senders.values()
    sender._die("pulled out")
    wait_until(lambda: follower.placement.name not in members(follower), "the follower is removed")
    with pytest.raises(NoLeader, match="not a member"):
        read(x)
    step(client, 2)


@pytest.mark.parametrize("lost", ["set_members", "lead"])
def test_lost_answer_of_the_registry_leaves_a_leader(cluster, client, lost):
    """The key says that a server leads which does not believe it: it gives the place away."""
    leader, follower = pair_up(cluster(), cluster())
    step(client)
    one = leader if lost == "set_members" else follower
    ask, answers = getattr(one.placement.registry, lost), []

    async def lose_one(*given):
        answers.append(await ask(*given))
        if len(answers) == 1:
            raise DiscoveryError("the answer was lost")
        return answers[-1]

    setattr(one.placement.registry, lost, lose_one)
    if lost == "set_members":
        (sender,) = leader.placement.replicas[UID].leader.senders.values()
        sender._die("pulled out")
    else:
        kill(leader)
    with within(40):
        step(client)
    assert answers
    led = next(s for s in (leader, follower) if role(s) is Role.LEADER)
    assert state_of(led)[0] == 2


def test_clocks_that_jump_change_nothing(cluster, client, monkeypatch):
    """Leases and deadlines go by the clock that only counts; the one on the wall may be hours off, and jump."""
    leader, follower = pair_up(cluster(ttl=LONG), cluster(ttl=LONG))
    term = leader.placement.replicas[UID].leader.term
    for number, hours in enumerate((0, 1, -1, 24)):
        clock = types.SimpleNamespace(
            time=lambda hours=hours: time.time() + 3600 * hours, monotonic=time.monotonic
        )
        for module in (
            discovery,
            etcd_client,
        ):  # grpc reads the clock too, and takes no other one
            monkeypatch.setattr(module, "time", clock)
        with within(40):
            step(client, number)
    assert role(leader) is Role.LEADER and leader.placement.replicas[UID].leader.term == term
    wait_until(lambda: state_of(follower) == state_of(leader), "equal replicas")
    assert state_of(leader)[0] == 4


def test_all_replicas_die_and_a_checkpoint_comes_back(cluster, client, tmp_path):
    one = cluster(replicas=1, checkpoint_dir=tmp_path)
    wait_until(lambda: role(one) is Role.LEADER, "it leads")
    for n in range(3):
        step(client, n)
    before = state_of(one)
    one.stop()
    two = cluster(replicas=1, checkpoint_dir=tmp_path)
    wait_until(lambda: role(two) is Role.LEADER, "it leads again")
    assert state_of(two) == before
    assert two.metrics.count("updates_lost_total") == 0


def test_lost_checkpoint_is_counted(cluster, client):
    one = cluster(replicas=1)
    wait_until(lambda: role(one) is Role.LEADER, "it leads")
    for n in range(3):
        step(client, n)
    one.stop()  # without a checkpoint
    two = cluster(replicas=1)
    wait_until(lambda: role(two) is Role.LEADER, "it leads, from the beginning")
    assert two.metrics.count("updates_lost_total") == 3


def test_two_servers_claim_one_uid(cluster):
    one, two = cluster(replicas=1), cluster(replicas=1)
    wait_until(lambda: Role.LEADER in (role(one), role(two)), "one leads")
    time.sleep(0.6)  # more than a look at everything
    assert [role(one), role(two)].count(Role.LEADER) == 1


def test_uid_that_nobody_hosts(client):
    client.settings = dataclasses.replace(PATIENT, patience=0.5)
    with within(20), pytest.raises(ExpertGone, match=r"expert\.77"):
        RemoteExpert("expert.77", client=client)(torch.randn(1, D))
