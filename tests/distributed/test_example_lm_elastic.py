"""examples/lm under torchrun --max-restarts: ranks are killed, and the curve is that of an undisturbed run."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.example_lm import (
    EXAMPLE,
    TINY,
    assert_same_checkpoint,
    assert_same_curve,
    train,
    write_text,
)

PATIENCE = 600.0  # seconds for a start of all ranks, on a busy machine


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


@contextlib.contextmanager
def torchrun(text, out, *arguments, options=()):
    """An agent of torchrun whose ranks train, in a session of its own, of which nobody stays."""
    trainer = [
        str(EXAMPLE / "train.py"),
        "--data",
        str(text),
        "--out",
        str(out),
        *TINY.split(),
        "--resume=auto",
    ]
    options = ["--log-dir", str(out.with_suffix(".logs")), *options]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *trainer, *arguments]
    root = str(EXAMPLE.parents[1])
    log = out.with_suffix(".log").open("ab")
    with (
        log,
        subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": root}, stdout=log, stderr=log, start_new_session=True
        ) as agent,
    ):
        try:
            yield agent
        finally:
            for pid in ranks_of(agent):
                kill(pid)
            agent.kill()


def ranks_of(agent):
    """The ids of the ranks that an agent has now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent.pid and b"train.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition, agent, out):
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert agent.poll() is None, f"torchrun ended with status {agent.returncode}:\n{said(out)}"
        assert time.monotonic() < deadline, f"nothing happened:\n{said(out)}"
        time.sleep(0.005)
    return value


def said(out):
    """Output of the ranks and their agents."""
    return out.with_suffix(".log").read_text()


def last_step(out):
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0  # one record a step


def kill_ranks(agent, out, kills, ranks):
    """kills: (rank, step that must have been done, seconds to wait then); step 0: while the ranks start."""
    before = set()
    for rank, step, seconds in kills:
        fresh = wait_until(functools.partial(fresh_ranks, agent, before, ranks), agent, out)
        wait_until(lambda step=step: last_step(out) >= step, agent, out)
        time.sleep(seconds)
        kill(fresh[rank])
        before = set(fresh)


def fresh_ranks(agent, before, ranks):
    """All ranks of an agent once none of those before is left, else nothing."""
    now = ranks_of(agent)
    return now if len(now) == ranks and not before & set(now) else []


def assert_survives(pool, text, tmp_path, kills, steps):
    options = f"--standalone --nproc-per-node=2 --max-restarts={len(kills)} --monitor-interval=0.1".split()
    arguments = "--steps", str(steps), "--save-every=3", "--val-every=10"
    with torchrun(text, tmp_path / "killed", *arguments, options=options) as agent:
        kill_ranks(agent, tmp_path / "killed", kills, ranks=2)
        assert agent.wait(PATIENCE) == 0, said(tmp_path / "killed")
    assert pool.run(train, text, tmp_path / "undisturbed", *arguments, world_size=2) == [0, 0]
    assert last_step(tmp_path / "undisturbed") == steps
    assert_same_curve(tmp_path / "killed", tmp_path / "undisturbed", most=0)
    assert_same_checkpoint(tmp_path / "killed", tmp_path / "undisturbed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*.tmp"))


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 4, 0.0)], id="in training", marks=pytest.mark.long),
        pytest.param([(0, 4, 0.0), (1, 0, 0.5)], id="and while the ranks start", marks=pytest.mark.slow),
    ],
)
def test_killed_rank_costs_steps_since_checkpoint(pool, text, tmp_path, kills):
    assert_survives(pool, text, tmp_path, kills, steps=40)


@pytest.mark.slow
def test_twenty_random_kills(pool, text, tmp_path):
    """In training, while a checkpoint is written, or while the ranks still start."""
    draw = random.Random(0)
    kills = [
        (draw.randrange(2), 0, draw.uniform(0, 4))
        if draw.random() < 0.3
        else (draw.randrange(2), 5 * number + 4, draw.uniform(0, 0.5))
        for number in range(20)
    ]
    assert_survives(pool, text, tmp_path, kills, steps=120)
