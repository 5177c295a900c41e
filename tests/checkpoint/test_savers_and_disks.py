"""Two jobs in one folder, full disks, links: what is there in the end is whole, and the error says what to do."""

import errno
import fcntl
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from fmoe_ext import checkpoint
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.files import (
    atomic_file,
    explained,
    fingerprint,
    lock_unread,
    locked,
    made_folder,
    read_locked,
)
from fmoe_ext.checkpoint.shards import continued, new_folder
from tests.forked import run_python

PAIRS = 20


def model_of(value, width=64):
    """Two tensors of one value each: a checkpoint with two values is one of two savers."""
    model = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width)})
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def values_in(path):
    model = model_of(-1)
    checkpoint.load(path, model)
    return {value for param in model.parameters() for value in param.unique().tolist()}


def saver(barrier, folder, value, export):
    """A child process that saves at the same time as others -> its id; exit code 0, or 3 where another one saves."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        model = model_of(value)
        os.read(barrier, 1)
        if export:
            checkpoint.export_safetensors(folder / "model.safetensors", model)
        else:
            checkpoint.save(folder, model, step=7)
        code = 0
    except CheckpointError as error:
        code = 3 if "is doing so now; give each job a folder of its own" in str(error) else 1
    finally:
        os._exit(code)


@pytest.mark.parametrize("export", [False, True], ids=["save", "export"])
def test_two_savers(tmp_path, export):
    """One of them saves, or both one after the other; never a mixture, and nothing is left behind."""
    script = (
        "import sys; from pathlib import Path; from test_savers_and_disks import pairs_of_savers; "
        f"pairs_of_savers(Path({str(tmp_path)!r}), {export})"
    )
    done = run_python(script, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, timeout=300)
    assert done.returncode == 0, done.stderr


def pairs_of_savers(root, export):
    torch.set_num_threads(1)
    for pair in range(PAIRS):
        folder = root / str(pair)
        folder.mkdir()
        barrier, start = os.pipe()
        children = [saver(barrier, folder, value, export) for value in (1.0, 2.0)]
        os.write(start, b"go")
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.close(barrier), os.close(start)
        assert set(codes) <= {0, 3} and 0 in codes, codes
        names = sorted(path.name for path in folder.iterdir())
        if export:
            assert names == ["model.safetensors"]
            assert len(values_in(folder / names[0])) == 1
            continue
        assert names == ["latest", "step-00000007", "step-00000007-1"][: 1 + codes.count(0)], names
        assert all(len(values_in(folder / name)) == 1 for name in names[1:])
        assert len(values_in(folder)) == 1


def test_lock_of_a_dead_process(tmp_path):
    """It ends with its process, however that ends; its file stays and disturbs nobody."""
    child = os.fork()
    if child == 0:
        with locked(tmp_path / ".lock", "saving"):
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert (tmp_path / ".lock").exists()
    checkpoint.save(tmp_path, model_of(1.0), step=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    with locked(tmp_path / ".lock", "another job"), pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path, model_of(2.0), step=2)
    assert f"process {os.getpid()} on {os.uname().nodename} is doing so now" in str(error.value)
    assert values_in(tmp_path) == {1.0}
    checkpoint.save(tmp_path, model_of(2.0), step=2)


@pytest.mark.parametrize("removes", [True, False])
def test_reader_waits_for_a_saver_that_removes(tmp_path, monkeypatch, removes):
    """It began in the moment between the saver's lock and its rename, and read a checkpoint that went away."""
    path, flock = tmp_path / "manifest.json", fcntl.flock
    path.write_text("{}")
    arrived, inherited, results = threading.Event(), [], []

    def observed(handle, kind):
        if kind == fcntl.LOCK_EX | fcntl.LOCK_NB:
            inherited.append(os.dup(handle))  # as by a child that is forked now
        if kind == fcntl.LOCK_SH:
            arrived.set()  # now it waits
        flock(handle, kind)

    def reader():
        try:
            with read_locked(path):
                results.append("read")
        except FileNotFoundError:
            results.append("removed")
        arrived.set()

    monkeypatch.setattr(fcntl, "flock", observed)
    thread = threading.Thread(target=reader)
    with lock_unread(path) as is_unread:
        thread.start()
        assert arrived.wait(60) and is_unread and results == []
        if removes:
            path.rename(tmp_path / "leaving")
    thread.join(60)
    found = list(results)
    os.close(inherited.pop())
    thread.join()
    assert found == ["removed" if removes else "read"]


def test_error_of_what_a_body_reads_keeps_its_text(tmp_path):
    """It was `[Errno None] None: 'x'`, or blamed the file that is written; a full disk's has the name."""
    path = tmp_path / "x"
    for error, text in (
        (OSError("a sentence"), "a sentence"),
        (OSError(errno.EIO, "of a source"), f"[Errno {errno.EIO}] of a source"),
        (OSError(errno.ENOSPC, "full"), f"[Errno {errno.ENOSPC}] full: '{path}'"),
    ):
        with pytest.raises(OSError) as raised, atomic_file(path):
            raise error
        assert str(raised.value) == text and not list(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="no space left"), explained(path, 10), atomic_file(path):
        raise OSError("100 requested and 5 written")  # numpy's, of a full disk


def test_folder_that_cannot_be_made_leaves_no_parents(tmp_path, monkeypatch):
    mkdir = os.mkdir

    def full(path, *args):
        if Path(path).name == "c" and Path(path).parent.exists():
            raise OSError(errno.ENOSPC, "full")
        mkdir(path, *args)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="full"), made_folder(tmp_path / "a/b/c"):
        pass
    assert not list(tmp_path.iterdir())


def test_unfinished_file_of_a_dead_process(tmp_path):
    path = tmp_path / "x[1].bin"
    child = os.fork()
    if child == 0:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    with atomic_file(path) as first:
        with atomic_file(path) as second:  # another process's, which lives
            second.write(b"second")
        first.write(b"first")
    assert path.read_bytes() == b"first" and len(list(tmp_path.iterdir())) == 1


def test_unfinished_folder_of_a_longer_name_stays(tmp_path):
    """Jobs that write model and model.v2 have locks of their own, so neither may remove what the other writes."""
    others = [tmp_path / f".{name}.1-abcd.tmp" for name in ("model.v2", "model1")]
    dead = [tmp_path / f".{name}.1-abcd.tmp" for name in ("model", "model[1]")]
    for folder in (*others, *dead):
        folder.mkdir()
    for name in ("model", "model[1]"):
        with new_folder(tmp_path / name):
            pass
    assert [folder.exists() for folder in (*others, *dead)] == [True, True, False, False]


def test_job_goes_on_with_its_own_files_alone(tmp_path):
    """Inputs of the same size and time differ by content; a note whose files are published vouches for nothing."""
    source, out = tmp_path / "source", tmp_path / "out"

    def ends(content, done=None, early=False):
        source.write_bytes(content)
        os.utime(source, (1, 1))
        with continued(out, "merging", {"files": [fingerprint(source)]}) as job:
            assert job.done == (done or {})
            (job.folder / "a").write_bytes(content)
            job.done["a"] = 1
            job.note()
            if early:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ends(b"one", early=True)
    with pytest.raises(
        CheckpointError, match="holds parts of another job: remove it, or give another folder"
    ):
        ends(b"two")
    note = (tmp_path / ".out.merging/job.json").read_bytes()
    ends(b"one", {"a": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    (tmp_path / ".out.merging").mkdir()  # ended between the rename and the removal of the note
    (tmp_path / ".out.merging/job.json").write_bytes(note)
    with pytest.raises(CheckpointError, match="out exists already"):
        ends(b"one")
    (out / "a").unlink()
    with pytest.raises(CheckpointError, match="holds parts of another job"):
        ends(b"two")
    ends(b"one")
    assert (out / "a").read_bytes() == b"one"


def test_old_checkpoint_that_is_a_link(tmp_path):
    """Someone moved it to another disk: the link goes, what it points to stays."""
    folder = tmp_path / "run"
    for step in (1, 2):
        checkpoint.save(folder, model_of(step), step=step)
    (folder / "step-00000001").rename(tmp_path / "moved")
    (folder / "step-00000001").symlink_to(tmp_path / "moved")
    (folder / ".step-00000000.x.tmp").symlink_to(tmp_path / "moved")
    checkpoint.save(folder, model_of(3), step=3, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000003"]
    assert values_in(tmp_path / "moved") == {1.0}


def big_model(value):
    return model_of(value, 700)  # 4 MB


def save_without_room(folder):
    """Both ways to write, where there is no room for either."""
    model, before = big_model(2.0), sorted(str(path) for path in folder.rglob("*"))
    for write in (
        lambda: checkpoint.save(folder, model, step=2),
        lambda: checkpoint.export_safetensors(folder / "model.safetensors", model),
    ):
        with pytest.raises(
            CheckpointError, match=r"no space left on the device.* 3,9\d\d,\d\d\d bytes needed"
        ):
            write()
        assert sorted(str(path) for path in folder.rglob("*")) == before
    assert values_in(folder) == {1.0}


def test_limit_on_the_size_of_files(tmp_path):
    checkpoint.save(tmp_path, model_of(1.0), step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        save_without_room(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted: {done.stderr.strip()}")
    try:
        checkpoint.save(tmp_path, model_of(1.0), step=1)
        (tmp_path / ".step-00000002.1-dead.tmp").mkdir()  # of a save that was killed
        (tmp_path / ".step-00000002.1-dead.tmp" / "part").write_bytes(b"\0" * 2**20)
        checkpoint.save(tmp_path, model_of(1.0, 500), step=1)  # 2 MB: has room only without it
        checkpoint.save(tmp_path, model_of(1.0), step=1, keep=1)
        save_without_room(tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
