"""DHT end to end: the words of hivemind's tutorial, servers and clients that find each other through nodes."""

import os
import re
import signal
import time

import pytest
import torch
from processes import DHT_NODE

from fmoe_ext.remote import (
    DHT,
    DeclaredExperts,
    DiscoveryError,
    Options,
    RemoteError,
    RemoteMixtureOfExperts,
    Server,
    Settings,
    loop,
)
from fmoe_ext.remote.dht.main import main
from fmoe_ext.remote.server.checkpoints import Checkpoints
from tests import ports
from tests.remote.conftest import wait_until, within

D = 16
DEAD = "127.0.0.1:1"


@pytest.fixture
def dhts(ends):
    """dhts(peers...) -> DHT that is shut down at the end"""

    def make(*peers, **options):
        options = {"listen_on": ports.endpoint(), "start": True, **options}
        return ends(DHT(initial_peers=list(peers), **options))

    return make


def where(dht, uid="expert.0"):
    (expert,) = dht.get_experts([uid])
    return expert.handle.record.endpoints[0]


def endpoint_of(dht):
    return f"127.0.0.1:{dht.port}"


@pytest.fixture
def server(open_nodes):
    discovery = open_nodes()
    options = Options(
        listen_on=ports.endpoint(), hidden_dim=D, num_experts=5, expert_pattern="expert.[0:5]", ttl=5
    )
    with Server(options, DeclaredExperts(discovery)) as running:
        yield running, f"127.0.0.1:{discovery.node.port}"


def test_tutorial_trains_through_experts_found_in_the_dht(server, dhts):
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


def test_server_that_stops_withdraws_its_experts(dhts, open_nodes):
    dht = dhts()
    discovery = open_nodes([endpoint_of(dht)])
    options = Options(listen_on=ports.endpoint(), hidden_dim=D, expert_uids=("expert.0",), ttl=600)
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
    assert loop.run(first.discovery.successors(["ffn", "ffn.0"]), 60) == {"ffn": set(), "ffn.0": set()}


def test_small_values_are_stored_beside_each_other_and_expire(dhts, tmp_path):
    first = dhts(identity_path=tmp_path / "key")
    second = dhts(endpoint_of(first))
    third = dhts(endpoint_of(first), listen=False)
    now = time.time()
    assert third.get("run1/metrics") is None
    assert first.store("run1/metrics", {"loss": 0.5, "who": "größe"}, now + 60)
    assert second.store("run1/metrics", [1, "x" * 900, None], now + 2)
    assert third.get("run1/metrics").value == {"loss": 0.5, "who": "größe"}  # the one that expires last
    found = third.get_all("run1/metrics")
    owners = [dht.discovery.identity.public for dht in (first, second)]
    assert set(found) == set(owners)
    assert found[owners[1]].value == [1, "x" * 900, None]
    assert found[owners[0]].expiration_time == pytest.approx(now + 60, abs=1)
    assert first.store("run1/metrics", "newer", now + 90)
    assert third.get("run1/metrics").value == "newer"
    assert third.get("run1") is None
    wait_until(lambda: set(third.get_all("run1/metrics")) == {owners[0]})
    first.store("other", 3, now + 600)
    first.shutdown()
    assert second.get("other").value == 3  # values stay when their owner leaves


@pytest.mark.parametrize(
    "value", ["x" * 1100, float("nan"), object(), {1, 2}], ids=["long", "NaN", "object", "set"]
)
def test_values_that_the_dht_cannot_keep_are_refused(dhts, value):
    with pytest.raises(ValueError, match=r"a value (must be JSON|has at most 1024 characters)"):
        dhts().store("key", value, time.time() + 5)
    with pytest.raises(ValueError, match=r"ttl must be above 0"):
        dhts().store("key", 1, time.time() - 5)


def test_all_initial_peers_dead_is_said_in_bounded_time(dhts):
    said = r"none of the initial peers 127\.0\.0\.1:1.*is a node listening"
    with within(20), pytest.raises(DiscoveryError, match=said):
        dhts(DEAD, "127.0.0.1:2", join_timeout=1.0)


def test_one_living_initial_peer_is_enough(dhts):
    first = dhts()
    second = dhts(DEAD, endpoint_of(first), listen=False)
    first.declare_experts(["expert.0"], "10.0.0.1:1")
    assert where(second) == "10.0.0.1:1"


def test_network_that_died_is_said_in_bounded_time(dhts):
    first = dhts()
    second = dhts(endpoint_of(first), listen=False)
    loop.run(first.discovery.close(), 60)
    for _ in range(3):
        with within(20), pytest.raises(DiscoveryError, match="did not answer"):
            second.get_experts(["expert.0"], timeout=2.0)


def test_node_without_a_port_needs_peers():
    with pytest.raises(DiscoveryError, match="needs initial_peers"):
        DHT(listen=False, start=True)
    with pytest.raises(ValueError, match=r"initial_peers.*host:port"):
        DHT(["nonsense"], start=True)


def test_busy_port_is_named(dhts):
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
    wait_until(lambda: [peer.endpoint for peer in first.node.table] == [f"[::1]:{second.port}"])


# ------------------------------------------------------------------ processes


def test_fmoe_dht_and_fmoe_server_as_processes(start_process, start_server, dhts):
    node = start_process(DHT_NODE, "--listen_on", ports.endpoint())
    seed = "127.0.0.1:" + node.wait_for(r"listens on port (\d+)")[1]
    flags = ("--ttl", 600, "--initial_peers", seed, "--num_experts", 3, "--expert_pattern", "expert.[5:250]")
    server = start_server(*flags)
    uids = re.findall(r"expert\.\d+", server.wait_for(r"Got 3 active experts of type ffn: (\[.*\])")[1])
    dht = dhts(seed, listen=False)
    experts = dht.get_experts(uids)
    x = torch.randn(2, D)
    assert all(torch.isfinite(expert(x)).all() for expert in experts)
    assert server.end() == 0
    assert dht.get_experts(uids) == [None] * 3
    assert node.end() == 0


def test_killed_server_gets_its_experts_back_by_its_identity(start_server, dhts, tmp_path):
    """Its record lives on for ten minutes; only who has its key may replace it before."""
    dht, begin = dhts(), time.monotonic()
    flags = ("--initial_peers", endpoint_of(dht), "--expert_uids", "expert.0", "--ttl", 600)
    flags += ("--checkpoint_dir", tmp_path / "saved", "--checkpoint_period", 0.05)
    first = start_server(*flags, "--identity_path", tmp_path / "key")
    before = first.endpoint()
    (expert,) = dht.get_experts(["expert.0"])
    expert(torch.randn(2, D)).sum().backward()
    saved = Checkpoints(tmp_path / "saved")
    wait_until(lambda: (state := saved.load("expert.0")) and state.meta["version"] == "1")
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    stranger = start_server(*flags)
    assert stranger.wait() == 2
    assert "other servers host expert.0" in stranger.path.read_text()
    second = start_server(*flags, "--identity_path", tmp_path / "key")
    assert second.endpoint() != before
    assert where(dht) == second.endpoint()
    expert(torch.randn(2, D)).sum().backward()  # found again by the module that knew the first one
    assert expert.handle.version == 2
    assert time.monotonic() - begin < 600  # the first record would still live, on however busy a machine
    assert second.end() == 0, second.path.read_text()


def test_server_behind_a_relay_is_called_there(start_process, start_server, dhts):
    """fmoe-dht is node and relay for an fmoe-server that announces nothing of its own."""
    flags = ("--listen_on", ports.endpoint(), "--relay_on", ports.endpoint(), "--relay_token", "secret")
    outside = start_process(DHT_NODE, *flags)
    relay = "127.0.0.1:" + outside.wait_for(r"Relay listens on port (\d+)")[1]
    node = "127.0.0.1:" + outside.wait_for(r"DHT node listens on port (\d+)")[1]
    flags = ("--initial_peers", node, "--expert_uids", "expert.0", "--relay", relay)
    refused = start_server(*flags, "--relay_token", "wrong")
    assert refused.wait() == 2
    assert "asks for another token" in refused.path.read_text()
    hidden = start_server(*flags, "--relay_token", "secret")
    said = hidden.endpoint()
    (expert,) = dhts(node, listen=False, settings=Settings(forward_timeout=20)).get_experts(["expert.0"])
    assert expert.handle.record.endpoints == (said,)
    expert(torch.randn(2, D)).sum().backward()
    outside.end(signal.SIGKILL)  # the only way in
    with pytest.raises(RemoteError):
        expert(torch.randn(2, D))
    assert hidden.end() == 0


def test_fmoe_dht_says_what_is_wrong(caplog, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--initial_peers", DEAD, "--listen_on", "127.0.0.1:0", "--join_timeout", "0.5"]) == 2
    assert "none of the initial peers" in caplog.text


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--listen_on 127.0.0.1", "--listen_on: must be host:port"),  # was port 443
        ("--listen_on 127.0.0.1:70000", "--listen_on: must be host:port"),  # was port 4464
        ("--relay_on foo", "--relay_on: must be host:port"),
        ("--announce foo", "--announce: must be host:port"),
        ("--stats_report_interval -1", "must be at least 0, but is -1"),  # was 2,000 lines a second
        ("--refresh_period 0", "must be more than 0, but is 0"),
        ("--join_timeout nan", "must be more than 0, but is nan"),
        ("--relay_token secret", "--relay_token means nothing without --relay or --relay_on"),
    ],
)
def test_fmoe_dht_refuses_what_cannot_be(capsys, flags, message):
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert message in capsys.readouterr().err


def test_identity_outlives_its_process(tmp_path, dhts):
    path = tmp_path / "key"
    first = dhts()
    second = dhts(endpoint_of(first), identity_path=path)
    assert second.declare_experts(["expert.0"], "a:1", ttl=600) == {"expert.0"}
    loop.run(second.discovery.close(), 60)  # as a crash: nothing is withdrawn
    assert first.declare_experts(["expert.0"], "b:1", ttl=600) == set()
    assert os.stat(path).st_mode & 0o077 == 0
    third = dhts(endpoint_of(first), identity_path=path)
    assert third.declare_experts(["expert.0"], "c:1", ttl=600) == {"expert.0"}
    assert where(first) == "c:1"
