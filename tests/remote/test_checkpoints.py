"""Checkpoints of experts: what the disk gives back is what was written, or it is refused by name."""

import asyncio
import errno
import random
import types

import pytest
import safetensors.torch
import torch

from fmoe_ext.remote import loop
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.server import checkpoints as module
from fmoe_ext.remote.server.checkpoints import Checkpoints, Damaged, Misnamed, decode_with_checksums
from fmoe_ext.remote.server.fair_queue import Job
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.options import Options, Training
from fmoe_ext.remote.server.pages import Metrics
from fmoe_ext.remote.server.saving import Saver
from fmoe_ext.remote.server.server import Server
from fmoe_ext.remote.server.state import read_state, write_state
from fmoe_ext.remote.wire import Message, WireError, encode

D = 8


def trained_host(*uids, steps=3):
    host = ExpertHost(find_expert_class("ffn"), D, Training("adam", lr=0.1))
    host.add(uids or ["expert.0"])
    for n in range(steps):
        for uid in host.experts:
            x = torch.randn(2, D)
            host.run([Job(uid, (x,), lambda _: None, torch.randn(2, D), f"{n:032x}")])
    return host


@pytest.fixture
def saved(tmp_path):
    """(Checkpoints, the state in them, the file)"""
    checkpoints = Checkpoints(tmp_path)
    state = read_state(trained_host(), "expert.0")
    checkpoints.save(state)
    return checkpoints, state, tmp_path / "expert.0.safetensors"


def test_saved_state_is_loaded_bit_by_bit(saved):
    checkpoints, state, path = saved
    loaded = checkpoints.load("expert.0")
    assert loaded.meta == state.meta
    assert loaded.tensors.keys() == state.tensors.keys()
    assert all(torch.equal(loaded.tensors[name], x) for name, x in state.tensors.items())
    table = safetensors.torch.load_file(path)["checksums"]
    assert table.shape == (2, 16)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1000, 1 << 20, (3 << 20) + 5])
def test_states_of_many_sizes_are_whole_until_one_byte_changes(tmp_path, size):
    checkpoints = Checkpoints(tmp_path)
    rng = random.Random(size)
    state = Message(
        {"weight/x": torch.randint(0, 255, (size,), dtype=torch.uint8)}, {"uid": "a.0", "version": "7"}
    )
    checkpoints.save(state)
    assert torch.equal(checkpoints.load("a.0").tensors["weight/x"], state.tensors["weight/x"])
    path = tmp_path / "a.0.safetensors"
    data = bytearray(path.read_bytes())
    for place in (0, 7, 100, len(data) - 1, len(data) - 17, rng.randrange(len(data))):
        data[place] ^= 1 << rng.randrange(8)
        with pytest.raises(Damaged):
            decode_with_checksums(bytes(data))
        path.write_bytes(data)
        with pytest.raises(Damaged, match=r"a\.0\.safetensors is damaged"):
            list(checkpoints.check("a.0"))
        data = bytearray(b"".join(module.encode_with_checksums(state)))


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_file_with_a_flipped_bit_is_accepted(saved, count):
    """490 of 1,000 were, with other weights, ids, terms or versions."""
    data, rng = bytearray(saved[2].read_bytes()), random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    accepted, versions = 0, set()
    for n in range(count):
        place = rng.randrange(header if n % 2 else len(data))
        bit = 1 << rng.randrange(8)
        data[place] ^= bit
        try:
            decode_with_checksums(bytes(data))
            accepted += 1
        except Damaged as error:
            versions.add(error.version)
        data[place] ^= bit
    assert accepted == 0
    assert versions <= {None, 3}  # a version that is named is right


@pytest.mark.parametrize("kind", ["cut", "zeros", "longer", "old end", "empty"])
def test_damaged_file_is_refused_by_name(saved, kind):
    checkpoints, _, path = saved
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[:-3]
    elif kind == "zeros":
        data[512:1024] = bytes(512)
    elif kind == "longer":
        data += b"\0"
    elif kind == "old end":
        checkpoints.save(read_state(trained_host(steps=5), "expert.0"))
        data[-200:] = path.read_bytes()[-200:]
    else:
        data = b""
    path.write_bytes(data)
    with pytest.raises(Damaged, match=str(path)):
        checkpoints.load("expert.0")


def test_damage_behind_the_header_leaves_the_version_known(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Message({"weight/x": torch.ones(1 << 19)}, {"uid": "a.0", "version": "139"}))
    path = tmp_path / "a.0.safetensors"
    data = bytearray(path.read_bytes())
    data[(1 << 20) + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged) as caught:
        checkpoints.load("a.0")
    assert caught.value.version == 139


def test_set_aside_keeps_the_bytes_under_new_names(saved):
    checkpoints, state, path = saved
    assert checkpoints.set_aside("expert.0") is None  # it is whole
    for number in (1, 2):
        checkpoints.save(state)
        path.write_bytes(path.read_bytes()[:-number])
        data = path.read_bytes()
        assert checkpoints.set_aside("expert.0") == f"expert.0.safetensors.damaged-{number}"
        assert (path.parent / f"expert.0.safetensors.damaged-{number}").read_bytes() == data
        assert checkpoints.load("expert.0") is None
    assert checkpoints.uids() == []


@pytest.fixture
def short_reads(monkeypatch):
    """The names that were opened; two reads of three end one byte early."""
    original, reads = module.Folder.open, []

    def short(self, name, fresh=False):
        file = original(self, name, fresh)
        reads.append(name)
        if len(reads) % 3:
            read = file.read
            wrapped = type("Short", (), {"read": lambda _, n=-1: read(n)[:-1], "seek": file.seek})()
            wrapped.__class__.__enter__ = lambda self: self
            wrapped.__class__.__exit__ = lambda self, *_: file.close()
            return wrapped
        return file

    monkeypatch.setattr(module.Folder, "open", short)
    return reads


def test_short_read_is_repeated_before_a_file_counts_as_damaged(saved, short_reads):
    checkpoints, state, path = saved
    assert checkpoints.load("expert.0").meta == state.meta
    list(checkpoints.check("expert.0"))
    assert len(short_reads) == 6


def test_short_read_does_not_hide_a_renamed_file(saved, short_reads):
    """Seed 1684 of the simulation: the server began the expert anew, with 20 updates on its own disk."""
    checkpoints, _, path = saved
    path.rename(path.with_name("expert.7.safetensors"))
    with pytest.raises(Misnamed, match=r"expert\.7\.safetensors holds the state of expert\.0"):
        checkpoints.begin()
    assert len(short_reads) == 3


def test_file_that_is_whole_at_a_later_reading_is_loaded(saved, monkeypatch):
    """The start of a server with replicas ended: its checkpoint was damaged, and then was not."""
    _, state, path = saved
    original, failed = Checkpoints.load, []

    def load(self, uid):
        if not failed:
            failed.append(uid)
            raise Damaged("bytes 0 to 8 differ from what was written", 3)
        return original(self, uid)

    monkeypatch.setattr(Checkpoints, "load", load)
    options = Options(hidden_dim=D, checkpoint_dir=path.parent, training=Training("adam", lr=0.1))
    server = Server(options, types.SimpleNamespace())
    server.host.is_replicated = True
    server.compute.start()
    try:
        loop.run(server.add_experts(["expert.0"]), 60)
    finally:
        server.compute.stop()
    expert = server.host.find("expert.0")
    assert failed == ["expert.0"] and path.exists()
    assert (expert.version, expert.ledger.lacks) == (3, 0)
    for name, weight in server.host.parameters("expert.0").items():
        assert torch.equal(weight, state.tensors[f"weight/{name}"])


def test_disk_that_answers_that_it_timed_out_is_tried_for_the_other_experts(tmp_path, monkeypatch):
    """A network disk's ETIMEDOUT was taken for no answer: the last save of a server left the other experts out."""
    host, write = trained_host("expert.0", "expert.1"), module.Folder.write

    def time_out(self, name, parts):
        if name.startswith("expert.0"):
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        write(self, name, parts)

    async def state_of(uid):
        return read_state(host, uid)

    monkeypatch.setattr(module.Folder, "write", time_out)
    saver = Saver(Checkpoints(tmp_path), host, Metrics(), state_of)
    failures = asyncio.run(saver.save(60.0))
    assert failures == {"expert.0": f"[Errno {errno.ETIMEDOUT}] Connection timed out"}
    assert (saver.is_stuck, saver.checkpoints.uids()) == (False, ["expert.1"])


def test_file_of_an_earlier_release_is_loaded_with_a_warning(saved, caplog):
    checkpoints, state, path = saved
    path.write_bytes(encode(state))
    with caplog.at_level("WARNING", "fmoe_ext.remote"):
        assert checkpoints.load("expert.0").meta == state.meta
    assert "has no checksums" in caplog.text
    list(checkpoints.check("expert.0"))
    checkpoints.save(checkpoints.load("expert.0"))
    caplog.clear()
    checkpoints.load("expert.0")
    assert not caplog.text


def test_file_with_another_experts_name_is_refused(saved):
    """It was taken, and overwritten at the end with version 0."""
    checkpoints, _, path = saved
    path.rename(path.with_name("expert.7.safetensors"))
    text = r"expert\.7\.safetensors holds the state of expert\.0: give it back its name, or move it away"
    with pytest.raises(Misnamed, match=text):
        checkpoints.load("expert.7")
    with pytest.raises(Misnamed, match=text):
        checkpoints.begin()


def test_file_that_is_no_experts_is_left_alone(saved):
    """A server could not start, or its reading of all files ended silently: "model" is no uid."""
    checkpoints, _, path = saved
    other = path.with_name("model.safetensors")
    safetensors.torch.save_file({"w": torch.ones(2)}, other)
    before = other.read_bytes()
    checkpoints.begin()
    assert checkpoints.uids() == ["expert.0"]
    assert other.read_bytes() == before


def test_expert_under_a_name_that_is_no_uid_ends_the_start(saved):
    checkpoints, _, path = saved
    path.rename(path.with_name("old.safetensors"))
    with pytest.raises(Misnamed, match=r"old\.safetensors holds the state of expert\.0"):
        checkpoints.begin()


def test_damaged_name_in_a_header_counts_as_damage(saved):
    checkpoints, _, path = saved
    path.write_bytes(path.read_bytes().replace(b'"uid":"expert.0"', b'"uid":"expert.1"'))
    checkpoints.begin()
    with pytest.raises(Damaged):
        checkpoints.load("expert.0")


def test_folder_that_another_server_has_is_refused_by_name(tmp_path):
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.begin()
    with pytest.raises(OSError, match=f"another server has the checkpoint folder {tmp_path}"):
        second.begin()
    first.end()
    second.begin()


@pytest.mark.parametrize("fault", ["write", "fsync", "replace", "fsync of the folder"])
def test_failed_save_leaves_the_file_before_and_nothing_else(saved, monkeypatch, fault):
    checkpoints, state, path = saved
    newer = read_state(trained_host(steps=4), "expert.0")

    def fail(*_):
        raise OSError(5, "Input/output error")

    if fault == "fsync of the folder":
        monkeypatch.setattr(module.Folder, "sync", fail)
    else:
        monkeypatch.setattr(
            module.os, {"write": "fsync", "fsync": "fsync", "replace": "replace"}[fault], fail
        )
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.save(newer)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    expected = newer if fault == "fsync of the folder" else state
    assert checkpoints.load("expert.0").meta == expected.meta


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("optimizer/0/exp_avg"), "lacks entries of the optimizer for parameters"),
        (lambda t: t.update({"optimizer/0/exp_avg": torch.zeros(3)}), "'exp_avg' .3. for parameter 0"),
        (lambda t: t.update({"optimizer/0/other": torch.zeros(())}), "'other' .* for parameter 0"),
        (lambda t: t.update({"optimizer/99/step": torch.zeros(())}), "entry for parameter '99'"),
        (lambda t: t.pop("applied.ids"), "no list of applied requests"),
    ],
)
def test_state_that_does_not_fit_is_refused_in_one_sentence(change, text):
    """It ended in a KeyError, at the start or at the next step."""
    host = trained_host()
    state = read_state(host, "expert.0")
    tensors = dict(state.tensors)
    change(tensors)
    with pytest.raises(WireError, match=text):
        write_state(host, Message(tensors, state.meta))
