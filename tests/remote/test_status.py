"""fmoe serve status: what it says of servers with a registry, without one, and of servers that are gone."""

import json
import time
import urllib.request

import pytest
import torch

from fmoe_ext.remote import DeclaredExperts, Options, RemoteExpert, Server, StaticList, Training, loop
from fmoe_ext.remote.client.client import Client, Settings
from fmoe_ext.remote.etcd.discovery import EtcdDiscovery
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.replication.site import Replication
from fmoe_ext.remote.server import main, status
from fmoe_ext.remote.wire import WireError

D, UID = 16, "expert.0"


@pytest.fixture
def start():
    servers = []

    def add(placement, **options):
        given = {
            "hidden_dim": D,
            "num_experts": 0,
            "expert_uids": (UID,),
            "training": Training("sgd", lr=0.05),
        }
        servers.append(Server(Options(**{**given, **options}), placement).start())
        return servers[-1]

    yield add
    for server in servers:
        server.stop()


def replicated(etcd):
    return ReplicatedExperts(Replication(etcd, 2, 2.0, ack_timeout=1.0, recovery_wait=3.0))


def ask(capsys, *arguments):
    """(status, rows) of the command."""
    code = main.main(["status", *arguments, "--json", "--timeout", "2"])
    return code, json.loads(capsys.readouterr().out)


def ask_until(capsys, condition, *arguments, seconds=15):
    end = time.monotonic() + seconds
    while True:
        code, rows = ask(capsys, *arguments)
        if condition(rows):
            return code, rows
        assert time.monotonic() < end, rows
        time.sleep(0.1)


def test_status_with_a_registry_names_leader_members_and_checkpoint(start, etcd, capsys, tmp_path):
    where = ("--registry", f"etcd://{etcd}")
    first = start(replicated(etcd), checkpoint_dir=tmp_path, http_on="127.0.0.1:0")
    second = start(replicated(etcd), expert_uids=())
    both = sorted((first.endpoint, second.endpoint))
    ask_until(capsys, lambda rows: rows and rows[0]["members"] == both, *where)
    discovery = EtcdDiscovery(etcd)
    client = Client(discovery, Settings(patience=8))
    expert = RemoteExpert(UID, None, client)
    for _ in range(3):
        expert(torch.ones(2, D)).sum().backward()
    loop.run(first.save(), 10)
    code, rows = ask_until(capsys, lambda rows: set(rows[0]["versions"].values()) == {3}, *where)
    (row,) = rows
    assert code == 0
    assert row["uid"] == UID and row["leader"] == first.endpoint and row["members"] == both
    assert row["version"] == 3 and row["versions"] == dict.fromkeys(both, 3)
    assert row["term"] == 1 and row["terms"] == dict.fromkeys(both, 1)
    assert row["learners"] == [] and row["waits"] == []
    assert row["checkpoint"]["version"] == 3 and row["checkpoint"]["server"] == first.endpoint
    assert abs(row["checkpoint"]["time"] - time.time()) < 60
    with urllib.request.urlopen(f"http://127.0.0.1:{first.pages.port}/status", timeout=5) as page:
        (shown,) = json.load(page)["table"]
    for key in ("uid", "leader", "members", "learners", "version", "term", "checkpoint", "waits"):
        assert shown[key] == row[key]
    loop.run(client.close(), 5)
    loop.run(discovery.close(), 5)


def test_status_of_a_dead_leader_waits_and_exits_with_1(start, etcd, capsys):
    server = start(replicated(etcd))
    where = server.endpoint
    server.stop()
    code, (row,) = ask(capsys, "--registry", f"etcd://{etcd}")
    assert code == 1 and row["leader"] == "" and row["members"] == [where]
    assert row["waits"][0] == "nobody leads" and row["waits"][1].startswith(f"{where} does not answer: ")


def test_status_without_a_registry_names_the_owner(start, capsys):
    server = start(DeclaredExperts(StaticList()))
    code, (row,) = ask(capsys, "--servers", server.endpoint)
    assert code == 0
    assert (row["leader"], row["members"], row["term"]) == (server.endpoint, [server.endpoint], 0)
    assert row["versions"] == {server.endpoint: 0} and row["checkpoint"] is None and row["waits"] == []
    assert main.main(["status", "--servers", server.endpoint]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "uid",
        "leader",
        "version",
        "term",
        "members",
        "learners",
        "checkpoint",
        "waits",
    ]
    assert line.split()[:4] == [UID, server.endpoint, "0", "0"]


@pytest.mark.parametrize("flags", [("--servers", "127.0.0.1:9"), ("--registry", "etcd://127.0.0.1:9")])
def test_status_of_nobody_is_one_sentence(flags):
    with pytest.raises(SystemExit, match=r"error: .*127\.0\.0\.1:9"):
        main.main(["status", *flags, "--timeout", "1"])


def test_status_without_flags_is_refused(capsys):
    with pytest.raises(SystemExit) as end:
        main.main(["status"])
    assert end.value.code == 2 and "name --registry" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"version": "1"}, {"learners": [1]}, {"checkpoint": 3}, {"role": None}])
def test_status_of_a_lying_server_is_refused(change):
    row = {"uid": UID, "version": 0, "role": "leader", "term": 1, "learners": [], "is_open": True}
    row |= {"waiting_updates": 0, "checkpoint": None}
    good = status.read_status(status.status_message({"experts": [row]}))
    assert good["experts"][UID]["term"] == 1
    with pytest.raises(WireError, match="holds no status"):
        status.read_status(status.status_message({"experts": [row | change]}))
