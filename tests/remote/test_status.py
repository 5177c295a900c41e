"""fmoe serve status: what etcd and the servers say of each replicated expert."""

import json
import urllib.request

import pytest
from dying import kill

from fmoe_ext.remote import Security, loop, status
from fmoe_ext.remote.replication.follower import Role
from fmoe_ext.remote.server import main as server_main
from tests.remote.conftest import wait_until
from tests.remote.test_replication import UID, client, cluster, pair_up, role, step

__all__ = ["client", "cluster"]  # fixtures


def read(etcd):
    (expert,) = loop.run(status.read_status(etcd), 30)
    return expert


def test_leader_members_terms_and_versions_are_those_of_the_servers(cluster, client, tmp_path, capsys):
    first = cluster(checkpoint_dir=tmp_path, checkpoint_period=3600)
    leader, follower = pair_up(first, cluster())
    for _ in range(3):
        step(client)
    loop.run(first.save(), 60)
    expert = read(cluster.endpoint)
    assert (expert.uid, expert.leader, expert.is_led) == (UID, leader.endpoint, True)
    by_endpoint = {replica.endpoint: replica for replica in expert.replicas}
    assert by_endpoint.keys() == {leader.endpoint, follower.endpoint}
    of_leader, of_follower = by_endpoint[leader.endpoint], by_endpoint[follower.endpoint]
    assert (of_leader.role, of_leader.version, of_leader.committed) == ("leader", 3, 3)
    assert (of_follower.role, of_follower.version, of_follower.is_member) == ("follower", 3, True)
    assert of_leader.term == of_follower.term == expert.term >= 1
    assert by_endpoint[first.endpoint].saved == 3 and of_leader.waiting == 0

    assert server_main.main(["status", "--registry", f"etcd://{cluster.endpoint}", "--json"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["leader"] == leader.endpoint and len(printed["replicas"]) == 2
    assert status.main(["--registry", f"etcd://{cluster.endpoint}"]) == 0
    table = capsys.readouterr().out
    assert f"led by {leader.endpoint}" in table and "follower" in table


def test_dead_member_is_named_and_the_exit_status_is_1(cluster, client, capsys):
    leader, follower = pair_up(cluster(ttl=8.0), cluster(ttl=8.0))
    step(client)
    kill(follower)
    assert status.main(["--registry", f"etcd://{cluster.endpoint}", "--timeout", "2"]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if follower.endpoint in line)
    assert "follower" not in line and len(line.split()) > 3  # the error, in the place of a role


def test_server_without_membership_is_shown_as_such(cluster, client):
    servers = [cluster(replicas=2) for _ in range(2)]
    leader, _ = pair_up(*servers)
    third = cluster(replicas=2)
    wait_until(lambda: role(third) is Role.IDLE, "an idle server")
    replicas = {replica.endpoint: replica for replica in read(cluster.endpoint).replicas}
    assert not replicas[third.endpoint].is_member and replicas[third.endpoint].role == "idle"
    assert "no member" in status.to_text([read(cluster.endpoint)])


def test_page_shows_role_term_and_versions(cluster, client):
    server = cluster(http_on="127.0.0.1:0", replicas=1)
    step(client)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.pages.port}/status", timeout=60) as answer:
        (expert,) = json.load(answer)["experts"]
    assert (expert["role"], expert["committed"], expert["waiting"]) == ("leader", "1", "0")
    assert int(expert["term"]) >= 1


def test_registry_that_does_not_answer_is_one_sentence():
    with pytest.raises(SystemExit, match=r"^etcd://127\.0\.0\.1:1: "):
        status.main(["--registry", "etcd://127.0.0.1:1", "--timeout", "1"])


def test_servers_with_tokens_answer_to_the_token_of_a_file(cluster, tmp_path, capsys):
    tokens = tmp_path / "tokens"
    tokens.write_text("operator: secret\n")
    tokens.chmod(0o600)
    cluster(replicas=1, security=Security(tokens={"secret": "operator"}))
    where = ["--registry", f"etcd://{cluster.endpoint}", "--timeout", "3"]
    assert status.main(where) == 1 and "token" in capsys.readouterr().out
    assert status.main([*where, "--tokens", str(tokens), "--own_token", "operator"]) == 0
    with pytest.raises(SystemExit):
        status.main([*where, "--tokens", str(tokens), "--own_token", "nobody"])
    assert "nobody is no name in" in capsys.readouterr().err
