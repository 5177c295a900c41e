"""Servers on disks that fail: each expert is saved by itself, and what is not saved, or must not be used, is said."""

import json
import re
import time
import urllib.request

import pytest
from dying import kill

from fmoe_ext.remote import DiscoveryError, StaticList, loop
from fmoe_ext.remote.replication.follower import Role
from fmoe_ext.remote.server.checkpoints import Checkpoints, Damaged, Folder
from tests import ports
from tests.remote.conftest import wait_until
from tests.remote.test_replication import client, cluster, pair_up, role, state_of
from tests.remote.test_replication import step as replicated_step
from tests.remote.test_server_process import step

__all__ = ["client", "cluster"]  # fixtures


def read_page(url):
    return urllib.request.urlopen(url, timeout=60).read().decode()


def test_expert_that_cannot_be_written_does_not_stop_the_others(expert_at, start_server, tmp_path):
    """expert.1 and expert.2 stayed at version 1, and SIGTERM ended in a traceback."""
    folder, uids = tmp_path / "ckpt", ["expert.0", "expert.1", "expert.2"]
    flags = ("--no_dht", "--expert_uids", *uids, "--checkpoint_dir", folder, "--checkpoint_period", 0.1)
    process = start_server(*flags, "--http_on", "127.0.0.1:0")
    endpoint, pages = process.endpoint(), process.wait_for(r"Status page at (\S+)")[1]
    experts, saved = [expert_at(endpoint, uid) for uid in uids], Checkpoints(folder)
    for expert in experts:
        step(expert)
    wait_until(lambda: len(saved.uids()) == 3 and saved.load("expert.0").meta["version"] == "1")
    blocked = folder / "expert.0.safetensors"
    blocked.unlink()
    blocked.mkdir()
    for expert in experts:
        step(expert, 4)
    wait_until(lambda: [saved.load(uid).meta["version"] for uid in uids[1:]] == ["5", "5"])
    wait_until(lambda: "fmoe_remote_unsaved_experts 1" in read_page(f"{pages}metrics"))
    assert "Is a directory" in json.loads(read_page(f"{pages}status"))["experts"][0]["unsaved"]
    assert process.end() == 3
    text = process.path.read_text()
    assert re.search(r"not saved: expert\.0 \(version 5, on disk 1: .*Is a directory[^;\n]*\)\n", text)
    assert "Traceback" not in text
    assert not list(folder.glob("*.tmp-*"))


def test_full_disk_at_sigterm_is_said_in_one_line(expert_at, start_server, tmp_path):
    module = tmp_path / "full.py"
    module.write_text(
        "import os\n\ndef fsync(file):\n    raise OSError(28, 'No space left on device')\n\nos.fsync = fsync\n"
    )
    flags = ("--no_dht", "--expert_uids", "expert.0", "--checkpoint_dir", tmp_path / "ckpt")
    process = start_server(*flags, "--custom_module_path", module)
    step(expert_at(process.endpoint()), 2)
    assert process.end() == 3
    lines = process.path.read_text().splitlines()
    assert any("not saved: expert.0 (version 2, on disk none: [Errno 28] No space" in line for line in lines)
    assert not any("Traceback" in line for line in lines)
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == [".lock"]


DISK = """
import os, pathlib, time

fsync, folder = os.fsync, pathlib.Path(__file__).parent

def slow(file):
    time.sleep(float((folder / "seconds").read_text()))
    fsync(file)

os.fsync = slow
"""


def test_slow_disk_delays_no_call_and_is_said(expert_at, start_server, tmp_path):
    (tmp_path / "disk.py").write_text(DISK)
    (tmp_path / "seconds").write_text("1.5")
    flags = ("--no_dht", "--expert_uids", "expert.0", "expert.1", "--checkpoint_dir", tmp_path / "ckpt")
    process = start_server(*flags, "--checkpoint_period", 0.2, "--custom_module_path", tmp_path / "disk.py")
    expert = expert_at(process.endpoint())
    process.wait_for(
        r"the checkpoint of expert\.\d is late: this save has taken \d+\.\d s, --checkpoint_period is 0\.2 s"
    )
    saves = len(list((tmp_path / "ckpt").glob("*.safetensors")))
    step(expert, 3)
    assert saves == len(list((tmp_path / "ckpt").glob("*.safetensors"))) == 0  # three calls while it wrote
    (tmp_path / "seconds").write_text("0")
    assert process.end() == 0
    assert Checkpoints(tmp_path / "ckpt").load("expert.0").meta["version"] == "3"


def test_disk_that_hangs_at_sigterm_ends_in_one_line(expert_at, start_server, tmp_path):
    (tmp_path / "disk.py").write_text(
        DISK + "from fmoe_ext.remote.server import saving\nsaving.PATIENCE = 0.5\n"
    )
    (tmp_path / "seconds").write_text("0")
    flags = ("--no_dht", "--expert_uids", "expert.0", "expert.1", "--checkpoint_dir", tmp_path / "ckpt")
    process = start_server(*flags, "--custom_module_path", tmp_path / "disk.py")
    step(expert_at(process.endpoint()), 2)
    (tmp_path / "seconds").write_text("10000")
    assert process.end() == 3
    (line,) = [line for line in process.path.read_text().splitlines() if "not saved: expert.0 (" in line]
    for uid, version in (("expert.0", 2), ("expert.1", 0)):
        assert f"{uid} (version {version}, on disk none: the disk did not answer within 0.5 s)" in line


def test_folder_that_becomes_read_only_is_said_at_sigterm(expert_at, start_server, tmp_path):
    module = tmp_path / "read_only.py"
    module.write_text(
        "from fmoe_ext.remote.server import checkpoints\n\n"
        "def open(name, mode='r'):\n"
        "    if 'w' in mode:\n"
        "        raise OSError(30, 'Read-only file system', str(name))\n"
        "    return real(name, mode)\n\n"
        "real, checkpoints.open = __builtins__['open'], open\n"
    )
    folder = tmp_path / "ckpt"
    flags = ("--no_dht", "--expert_uids", "expert.0", "--checkpoint_dir", folder)
    before = start_server(*flags)
    step(expert_at(before.endpoint()))
    assert before.end() == 0
    process = start_server(*flags, "--custom_module_path", module)
    step(expert_at(process.endpoint()), 2)
    assert process.end() == 3
    (line,) = [line for line in process.path.read_text().splitlines() if "not saved: expert.0 (" in line]
    assert (
        "expert.0 (version 3, on disk 1: [Errno 30] Read-only file system: " in line and str(folder) in line
    )
    assert "Traceback" not in process.path.read_text()
    assert Checkpoints(folder).load("expert.0").meta["version"] == "1"


def test_failed_save_is_tried_again(serve, tmp_path, monkeypatch):
    server, directory = serve(checkpoint_dir=tmp_path, checkpoint_period=0.05, expert_uids=("expert.0",))
    write, fails = Folder.write, [True]

    def fail(self, name, parts):
        if fails:
            raise OSError(28, "No space left on device")
        write(self, name, parts)

    monkeypatch.setattr(Folder, "write", fail)
    (expert,) = directory.get_experts(["expert.0"])
    step(expert)
    wait_until(lambda: server.metrics.count("checkpoint_failures_total") >= 2)
    assert "No space" in server.describe("expert.0")["unsaved"]
    fails.clear()
    wait_until(lambda: server.describe("expert.0").get("saved") == "1")
    assert "unsaved" not in server.describe("expert.0") and server.saver.describe_unsaved() == ""


@pytest.mark.parametrize("fault", ["damaged", "renamed", "another width", "second start"])
def test_checkpoint_that_must_not_be_used_ends_the_start_in_one_line(
    expert_at, start_server, tmp_path, fault
):
    folder = tmp_path / "ckpt"
    flags = ("--no_dht", "--expert_uids", "expert.0", "expert.7", "--checkpoint_dir", folder)
    first = start_server(*flags)
    step(expert_at(first.endpoint()), 2)
    if fault != "second start":
        assert first.end() == 0
    path = folder / "expert.0.safetensors"
    text = rf"another server has the checkpoint folder {folder}: stop it"
    if fault == "damaged":
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
        text = rf"{path} is damaged: .* differ from what was written. Restore what is damaged"
    elif fault == "renamed":
        path.replace(folder / "expert.7.safetensors")
        text = r"expert\.7\.safetensors holds the state of expert\.0: give it back its name"
    elif fault == "another width":
        flags = (*flags, "--hidden_dim", 32)
        text = "the state of expert.0 has hidden_dim=16, but this server has 32"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    second = start_server(*flags)
    assert second.wait() == (4 if fault == "second start" else 2)
    printed = second.path.read_text()
    assert re.search(text, printed), printed
    assert "Traceback" not in printed
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    if fault == "second start":
        step(expert_at(first.endpoint()))
        assert first.end() == 0
        assert Checkpoints(folder).load("expert.0").meta["version"] == "3"


@pytest.mark.parametrize("fault", ["damaged", "silent directory"])
def test_start_that_fails_withdraws_its_claims(serve, tmp_path, fault):
    """The uids stayed taken until their ttl had passed, for the server that was started once the file was back."""
    serve(checkpoint_dir=tmp_path)[0].stop()
    path, options, directory = tmp_path / "expert.0.safetensors", {}, StaticList()
    data = path.read_bytes()
    if fault == "damaged":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:  # after it has granted the uids of the checkpoints

        async def get(uids, *, timeout=5.0):
            raise DiscoveryError("no node answers")

        directory.get = get
        options = {"expert_uids": (), "num_experts": 3, "expert_pattern": "expert.[0:9]"}
    with pytest.raises((Damaged, DiscoveryError), match=r"expert\.0\.safetensors|no node answers"):
        serve(checkpoint_dir=tmp_path, discovery=directory, **options)
    assert loop.run(StaticList.get(directory, ["expert.0", "expert.1"]), 60) == [None, None]
    path.write_bytes(data)
    other, _ = serve(checkpoint_dir=tmp_path, discovery=directory)
    assert sorted(other.host.experts) == ["expert.0", "expert.1"]


def test_second_server_with_one_identity_ends_by_name(start_server, tmp_path):
    """Both were granted the uid, and 60 of 80 acknowledged gradients survived."""
    flags = (
        "--expert_uids",
        "expert.0",
        "--identity_path",
        tmp_path / "key",
        "--listen_on",
        ports.endpoint(),
    )
    first = start_server(*flags, "--checkpoint_dir", tmp_path / "0")
    first.endpoint()
    second = start_server(*flags, "--checkpoint_dir", tmp_path / "1")
    assert second.wait() == 4
    text = (
        f"another server runs with the identity {tmp_path / 'key'}: stop it, or name another --identity_path"
    )
    assert text in second.path.read_text() and "Traceback" not in second.path.read_text()
    assert first.end() == 0
    third = start_server(*flags, "--checkpoint_dir", tmp_path / "1")
    third.endpoint()
    assert third.end() == 0


def test_damage_at_rest_is_found_and_written_anew(serve, tmp_path):
    server, directory = serve(checkpoint_dir=tmp_path, expert_uids=("expert.0",))
    (expert,) = directory.get_experts(["expert.0"])
    step(expert, 2)
    loop.run(server.save(), 60)
    path = tmp_path / "expert.0.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    loop.run(server.saver.check_at_rest(1e9), 60)
    assert (tmp_path / "expert.0.safetensors.damaged-1").read_bytes() == data
    assert Checkpoints(tmp_path).load("expert.0").meta["version"] == "2"
    status = server.status()["checkpoints"]
    assert status["damaged"] == ["expert.0.safetensors.damaged-1"] and status["checked"] > 0
    assert server.metrics.count("checkpoints_damaged_total") == 1


def test_checkpoints_are_read_again_at_a_bounded_rate(serve, tmp_path):
    server, _ = serve(checkpoint_dir=tmp_path, expert_uids=("expert.0",), hidden_dim=256)
    loop.run(server.save(), 60)
    size = (tmp_path / "expert.0.safetensors").stat().st_size
    begin = time.monotonic()
    loop.run(server.saver.check_at_rest(size / 0.4), 60)
    assert time.monotonic() - begin > 0.35


def lose_power(*servers):
    """As at a power loss: the lock of a folder ends with its process."""
    for server in servers:
        loop.run(server.save(), 60)
        kill(server)
        server.checkpoints.end()


def flip(path, place=-100):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", ["a weight", "the term"])
def test_replica_with_a_damaged_checkpoint_takes_a_copy_of_the_good_one(cluster, client, tmp_path, what):
    """A flipped bit of a weight was served by both; one of the term let an old file lead."""
    folders = [tmp_path / "0", tmp_path / "1"]
    first = [cluster(checkpoint_dir=folder) for folder in folders]
    pair_up(*first)
    for n in range(4):
        replicated_step(client, n)
    wait_until(lambda: state_of(first[0]) == state_of(first[1]), "equal replicas")
    before = state_of(first[1])
    lose_power(*first)
    path = folders[0] / "expert.0.safetensors"
    if what == "a weight":
        flip(path)
    else:
        path.write_bytes(path.read_bytes().replace(b'"term":"', b'"term":"9', 1))
    damaged = path.read_bytes()
    second = [cluster(checkpoint_dir=folder) for folder in folders]
    leader, follower = pair_up(*second)
    assert leader is second[1]
    wait_until(lambda: state_of(follower) == before, "equal replicas")
    assert leader.metrics.count("updates_lost_total") == 0
    assert (folders[0] / "expert.0.safetensors.damaged-1").read_bytes() == damaged
    assert second[0].status()["checkpoints"]["damaged"] == ["expert.0.safetensors.damaged-1"]


def test_only_checkpoint_is_damaged_and_the_loss_is_counted(cluster, client, tmp_path):
    one = cluster(replicas=1, checkpoint_dir=tmp_path)
    wait_until(lambda: role(one) is Role.LEADER, "it leads")
    for n in range(3):
        replicated_step(client, n)
    one.stop()
    flip(tmp_path / "expert.0.safetensors")
    begin = time.monotonic()
    two = cluster(replicas=1, checkpoint_dir=tmp_path)
    wait_until(lambda: role(two) is Role.LEADER, "it leads, from the beginning")
    assert time.monotonic() - begin > 2.5  # it waits for a replica that has everything
    assert two.metrics.count("updates_lost_total") == two.metrics.count("gradients_lost_total") == 3


def test_copy_that_a_leader_asks_for_begins_with_the_checkpoint(cluster, client, tmp_path):
    """The file was overwritten with version 0 while the copy was on its way."""
    one = cluster(replicas=1, checkpoint_dir=tmp_path)
    wait_until(lambda: role(one) is Role.LEADER, "it leads")
    for n in range(3):
        replicated_step(client, n)
    one.stop()
    two = cluster(uids=("expert.1",), replicas=1, checkpoint_dir=tmp_path)
    loop.run(two.placement.host_expert("expert.0"), 60)
    assert two.host.find("expert.0").version == 3
