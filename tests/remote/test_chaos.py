"""Training while the network is bad and servers die: no call beyond its deadline, no update lost or applied twice."""

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from dying import kill
from proxy import BadNetwork, BadPost
from torch import nn

from fmoe_ext.remote import (
    Client,
    Options,
    RemoteError,
    RemoteExpert,
    Server,
    Settings,
    Training,
    make_expert,
)
from fmoe_ext.remote.client.expert import MARGIN as MARGIN_OF_CALLS
from fmoe_ext.remote.etcd.client import EtcdDiscovery
from fmoe_ext.remote.replication.follower import Role
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.server.options import Replication
from tests import ports
from tests.remote.conftest import end

D, UIDS = 16, ("expert.0", "expert.1")
DEADLINE = 40.0
# Of the final loss, relative to local training, where leaders die: a leader that began with a copy lacks the answers
# from before it, and answers a gradient that comes again from its present weights.
MARGIN = 0.05
EXACT = 1e-5  # of each loss: the mathematics is the same, and experts computed together may round otherwise


def start_server(etcd, network):
    """A server that everybody, other servers too, reaches through the bad network only."""
    own = ports.endpoint()
    training = Training("sgd", lr=0.02)
    options = Options(
        hidden_dim=D, expert_uids=UIDS, listen_on=own, announce=network.to(own), training=training
    )
    replication = Replication(etcd, replicas=2, ttl=2.0, ack_timeout=2.0, recovery_wait=2.0)
    return Server(options, ReplicatedExperts(replication)).start()


def train(first, second, steps, optimizers=()):
    """Every number that is drawn comes from here: servers of this process draw others meanwhile."""
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(D, 1)
    for p in head.parameters():
        nn.init.uniform_(p, -0.25, 0.25, generator=generator)
    local = torch.optim.SGD(head.parameters(), lr=0.02)
    losses, longest = [], 0.0
    for _ in range(steps):
        x = torch.randn(16, D, generator=generator)
        begin = time.monotonic()
        loss = (head(second(first(x))) - x.sum(1, keepdim=True)).pow(2).mean()
        for optimizer in (local, *optimizers):
            optimizer.zero_grad()
        loss.backward()
        longest = max(longest, time.monotonic() - begin)
        for optimizer in (local, *optimizers):
            optimizer.step()
        losses.append(loss.item())
    return losses, longest


@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(15, 1, marks=pytest.mark.long), pytest.param(150, 4, marks=pytest.mark.slow)],
)
def test_bad_network_and_dying_servers(ends, etcd, steps, kills):
    """50 ms latency with jitter, 2 % loss, cut connections; a third of the servers killed and replaced, kills times."""
    network = ends(BadNetwork(cut=0.001))
    servers = [ends(start_server(etcd, network)) for _ in range(3)]
    discovery = ends(EtcdDiscovery(etcd))
    client = ends(Client(discovery, Settings("none", DEADLINE, DEADLINE, DEADLINE, patience=DEADLINE)))
    done, rng = threading.Event(), random.Random(0)

    def replicated():
        members = [servers[-1].placement.registry.view.members(uid)[0] for uid in UIDS]
        alive = {s.placement.name for s in servers}
        return all(m is not None and len(set(m.endpoints) & alive) == 2 for m in members)

    def wait_replicated():
        latest = time.monotonic() + 60
        while not replicated():
            assert time.monotonic() < latest, "no two replicas within 60 s"
            time.sleep(0.05)

    def murder():
        for _ in range(kills):
            if done.wait(1.0):
                return
            wait_replicated()
            victim = servers.pop(rng.randrange(len(servers) - 1))
            kill(victim)
            servers.append(ends(start_server(etcd, network)))
            victim.compute.stop()

    wait_replicated()
    remote = [RemoteExpert(uid, client=client) for uid in UIDS]
    with ThreadPoolExecutor(1) as thread:
        murders = thread.submit(murder)
        try:
            losses, longest = train(*remote, steps)
        finally:
            done.set()
        murders.result(120)
    local = [make_expert("ffn", D, uid=uid) for uid in UIDS]
    truth, _ = train(*local, steps, [torch.optim.SGD(e.parameters(), lr=0.02) for e in local])
    assert longest < 4 * DEADLINE  # two forwards, two backwards
    assert client.counts["gradients applied"] == 2 * steps
    for uid in UIDS:
        led = [s for s in servers if s.placement.replicas[uid].role is Role.LEADER]
        latest = time.monotonic() + 60
        while not led:
            assert time.monotonic() < latest, "nobody leads"
            time.sleep(0.05)
            led = [s for s in servers if s.placement.replicas[uid].role is Role.LEADER]
        expert = led[0].host.find(uid)
        assert expert.num_requests == expert.version == steps  # none lost, none applied twice
    assert losses[-1] == pytest.approx(truth[-1], rel=MARGIN)


@pytest.mark.parametrize("steps", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_calls_that_are_lost_repeated_late_and_out_of_order(ends, etcd, steps):
    """Between client and servers, and between the replicas: each gradient is applied exactly once, on both, and each
    forward sees all of them."""
    replication = Replication(etcd, replicas=2, ttl=10.0)
    options = {"hidden_dim": D, "expert_uids": UIDS, "training": Training("sgd", lr=0.02)}
    servers = [
        ends(Server(Options(listen_on=ports.endpoint(), **options), ReplicatedExperts(replication)).start())
        for _ in range(2)
    ]
    discovery = ends(EtcdDiscovery(etcd))
    client = ends(Client(discovery, Settings("none", DEADLINE, DEADLINE, DEADLINE, patience=DEADLINE)))
    post = BadPost()
    for caller in (client.caller, *(server.placement.peers for server in servers)):
        post.carry(caller)
    losses, longest = train(*(RemoteExpert(uid, client=client) for uid in UIDS), steps)
    local = [make_expert("ffn", D, uid=uid) for uid in UIDS]
    truth, _ = train(*local, steps, [torch.optim.SGD(e.parameters(), lr=0.02) for e in local])
    assert min(post.num_lost_questions, post.num_lost_answers, post.num_copies) > 0
    assert longest < 4 * DEADLINE
    assert client.counts["gradients applied"] == 2 * steps

    def counts():
        roles = [(uid, server, server.placement.replicas[uid].role) for uid in UIDS for server in servers]
        return [(role, s.host.find(uid).num_requests) for uid, s, role in roles if role is not Role.IDLE]

    latest = time.monotonic() + 60
    while sorted(counts(), key=str) != sorted([(Role.LEADER, steps), (Role.FOLLOWER, steps)] * 2, key=str):
        assert time.monotonic() < latest, counts()
        time.sleep(0.05)
    assert losses == pytest.approx(truth, rel=EXACT)


def test_no_call_lives_longer_than_its_deadline(ends, serve):
    """Info, forward, backward through a network in which most of them fail."""
    server, _ = serve(hidden_dim=D)
    network = ends(BadNetwork(delay=0.1, jitter=1.0, loss=0.3, cut=0.1))
    where, seconds, failed = network.to(server.endpoint), [], 0
    for _ in range(12):
        client = ends(Client(settings=Settings("none", 0.3, 0.3, 0.3, patience=0.3)))
        expert = RemoteExpert("expert.0", where, client)
        try:
            for work in (expert.schema, lambda: expert(torch.randn(4, D)).sum().backward()):  # noqa: B023
                begin = time.monotonic()
                work()
        except RemoteError:
            failed += 1
        seconds.append(time.monotonic() - begin)
    assert failed > 0
    assert max(seconds) < 2 * (0.3 + MARGIN_OF_CALLS) + 10  # forward, backward, what a busy machine adds


def usage():
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return memory / 2**20, threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc, which only Linux has")
@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_soak(serve, rounds):
    """Random calls, good and bad, by clients that come and go: memory, threads and file descriptors stay flat."""
    server, _ = serve(hidden_dim=D)
    rng = random.Random(0)

    def one_client():
        client = Client(settings=Settings(rng.choice(("none", "bf16", "int8")), 5, 5, patience=0))
        try:
            for _ in range(50):
                expert = RemoteExpert(
                    rng.choice(("expert.0", "expert.1", "expert.7")), server.endpoint, client
                )
                x = torch.randn(rng.randint(1, 64), D, requires_grad=True)
                with contextlib.suppress(RemoteError):
                    y = expert(x if rng.random() < 0.9 else x * float("nan"))
                    if rng.random() < 0.7:
                        y.sum().backward()
        finally:
            end(client)

    for _ in range(2):
        one_client()
    memory, threads, files = usage()
    for _ in range(rounds):
        one_client()
    grown = [now - before for now, before in zip(usage(), (memory, threads, files), strict=True)]
    assert grown[0] < 30 + rounds, f"{grown[0]:.0f} MiB more"
    assert grown[1] <= 2, f"{grown[1]} threads more"
    assert grown[2] <= 8, f"{grown[2]} file descriptors more"
