"""DHT end to end: the words of hivemind's tutorial, servers and clients that find each other through nodes."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from fmoe_ext.remote import (
    DHT,
    DeclaredExperts,
    DiscoveryError,
    Options,
    RemoteMixtureOfExperts,
    Server,
    loop,
)
from fmoe_ext.remote.dht.main import main

D = 16
DEAD = "127.0.0.1:1"


@pytest.fixture
def dhts():
    """dhts(peers...) -> DHT that is shut down at the end"""
    started = []

    def make(*peers, **options):
        options = {"listen_on": "127.0.0.1:0", "start": True, **options}
        started.append(DHT(initial_peers=list(peers), **options))
        return started[-1]

    yield make
    for dht in started:
        dht.shutdown()


def poll(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not come true within {seconds} s"
        time.sleep(0.05)


def where(dht, uid="expert.0"):
    (expert,) = dht.get_experts([uid])
    return expert.handle.record.endpoints[0]


def endpoint_of(dht):
    return f"127.0.0.1:{dht.port}"


@pytest.fixture
def server(open_nodes):
    discovery = open_nodes()
    options = Options(hidden_dim=D, num_experts=5, expert_pattern="expert.[0:5]", ttl=5)
    with Server(options, DeclaredExperts(discovery)) as running:
        yield running, f"127.0.0.1:{discovery.node.port}"


def test_the_tutorial_trains_through_experts_found_in_the_dht(server, dhts):
    running, endpoint = server
    dht = dhts(endpoint, listen=False)
    assert dht.port is None
    expert1, expert4, missing = dht.get_experts(["expert.1", "expert.4", "expert.5"])
    assert missing is None
    expert1(torch.randn(3, D)).sum().backward()
    out = expert1(expert4(torch.randn(3, D)))
    out.sum().backward()
    assert running.host.experts["expert.1"].version == 2
    layer = RemoteMixtureOfExperts(in_features=D, uid_prefix="expert", grid_size=(5,), dht=dht, k_best=2)
    layer(torch.randn(4, D)).sum().backward()
    assert layer.proj.weight.grad.abs().sum() > 0


def test_a_server_that_stops_withdraws_its_experts(dhts, open_nodes):
    dht = dhts()
    discovery = open_nodes([endpoint_of(dht)])
    options = Options(hidden_dim=D, expert_uids=("expert.0",), ttl=600)
    with Server(options, DeclaredExperts(discovery)) as running:
        assert where(dht) == running.endpoint
    assert dht.get_experts(["expert.0"]) == [None]


def test_declared_experts_leave_with_the_dht(dhts):
    first = dhts()
    second = dhts(endpoint_of(first))
    assert second.declare_experts(["ffn.0.1", "ffn.0.2"], "10.0.0.1:1", ttl=600) == {"ffn.0.1", "ffn.0.2"}
    assert where(first, "ffn.0.1") == "10.0.0.1:1"
    second.shutdown()
    assert first.get_experts(["ffn.0.1", "ffn.0.2"]) == [None, None]
    assert loop.run(first.discovery.successors(["ffn", "ffn.0"]), 5) == {"ffn": set(), "ffn.0": set()}


def test_all_initial_peers_dead_is_said_in_bounded_time(dhts):
    begin = time.monotonic()
    with pytest.raises(
        DiscoveryError, match=r"none of the initial peers 127\.0\.0\.1:1.*is a node listening"
    ):
        dhts(DEAD, "127.0.0.1:2", join_timeout=1.0)
    assert time.monotonic() - begin < 3


def test_one_living_initial_peer_is_enough(dhts):
    first = dhts()
    second = dhts(DEAD, endpoint_of(first), listen=False)
    first.declare_experts(["expert.0"], "10.0.0.1:1")
    assert where(second) == "10.0.0.1:1"


def test_a_network_that_died_is_said_in_bounded_time(dhts):
    first = dhts()
    second = dhts(endpoint_of(first), listen=False)
    loop.run(first.discovery.close(), 5)
    begin = time.monotonic()
    for _ in range(3):
        with pytest.raises(DiscoveryError, match="did not answer"):
            second.get_experts(["expert.0"], timeout=2.0)
    assert time.monotonic() - begin < 6.5


def test_a_node_without_a_port_needs_peers():
    with pytest.raises(DiscoveryError, match="needs initial_peers"):
        DHT(listen=False, start=True)
    with pytest.raises(ValueError, match=r"initial_peers.*host:port"):
        DHT(["nonsense"], start=True)


def test_a_busy_port_is_named(dhts):
    first = dhts()
    with pytest.raises(OSError, match=f"cannot listen on {endpoint_of(first)}"):
        dhts(listen_on=endpoint_of(first))


def test_ipv6(dhts):
    try:
        first = dhts(listen_on="[::1]:0")
    except OSError:
        pytest.skip("this host has no IPv6")
    second = dhts(f"[::1]:{first.port}", listen_on="[::1]:0")
    second.declare_experts(["expert.0"], "[::1]:1234")
    assert where(first) == "[::1]:1234"
    poll(lambda: [peer.endpoint for peer in first.node.table] == [f"[::1]:{second.port}"])


# ------------------------------------------------------------------ processes


@pytest.fixture
def run_module(tmp_path):
    """run_module(module, flags...) -> wait(pattern) for a line of its output"""
    processes = []

    def start(module, *flags):
        path = tmp_path / f"{len(processes)}.log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, flags)], stdout=log, stderr=log
            )
        processes.append(process)

        def wait(pattern):
            poll(lambda: re.search(pattern, path.read_text()) or process.poll() is not None, 120)
            found = re.search(pattern, path.read_text())
            assert found, path.read_text()
            return found[1]

        return process, wait

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_fmoe_dht_and_fmoe_server_as_processes(run_module, dhts):
    seed_process, wait = run_module("fmoe_ext.remote.dht.main", "--listen_on", "127.0.0.1:0")
    seed = "127.0.0.1:" + wait(r"listens on port (\d+)")
    flags = ("--hidden_dim", D, "--listen_on", "127.0.0.1:0", "--num_threads", 1, "--ttl", 600)
    flags += ("--initial_peers", seed, "--num_experts", 3, "--expert_pattern", "expert.[5:250]")
    server, wait = run_module("fmoe_ext.remote.server.main", *flags)
    uids = re.findall(r"expert\.\d+", wait(r"Got 3 active experts of type ffn: (\[.*\])"))
    dht = dhts(seed, listen=False)
    experts = dht.get_experts(uids)
    x = torch.randn(2, D)
    assert all(torch.isfinite(expert(x)).all() for expert in experts)
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    assert dht.get_experts(uids) == [None] * 3
    seed_process.send_signal(signal.SIGTERM)
    assert seed_process.wait(20) == 0


def test_fmoe_dht_says_what_is_wrong(caplog, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--initial_peers", DEAD, "--listen_on", "127.0.0.1:0", "--join_timeout", "0.5"]) == 1
    assert "none of the initial peers" in caplog.text


def test_an_identity_outlives_its_process(tmp_path, dhts):
    path = tmp_path / "key"
    first = dhts()
    second = dhts(endpoint_of(first), identity_path=path)
    assert second.declare_experts(["expert.0"], "a:1", ttl=600) == {"expert.0"}
    loop.run(second.discovery.close(), 5)  # as a crash: nothing is withdrawn
    assert first.declare_experts(["expert.0"], "b:1", ttl=600) == set()
    assert os.stat(path).st_mode & 0o077 == 0
    third = dhts(endpoint_of(first), identity_path=path)
    assert third.declare_experts(["expert.0"], "c:1", ttl=600) == {"expert.0"}
    assert where(first) == "c:1"
