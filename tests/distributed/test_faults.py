"""Ranks that disagree, skip, die: an error with text on every rank, no hang, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.testing import DistributedError, DistributedPool

ROOT = Path(__file__).resolve().parents[2]


def make(num_expert=2, d_model=4, **options):
    return FMoETransformerMLP(num_expert, d_model, 3, world_size=dist.get_world_size(), **options)


def disagree(how):
    """One step in which rank 1 does something else than rank 0."""
    odd = dist.get_rank() == 1
    layers = [make() for _ in range(2)]
    x = torch.randn(3, 4)
    layers[0](x)
    layers[1](x)
    if how == "skip":
        layers[1 if odd else 0](x)
    elif how == "dtype":
        layers[0].double()(x.double()) if odd else layers[0](x)
    elif how == "width":
        make(d_model=6)(torch.randn(3, 6)) if odd else make()(x)
    elif how == "num_experts":
        make(num_expert=3)(x) if odd else make()(x)
    elif how == "bound":
        make(max_rows_per_rank=16 if odd else 12)(x)
    elif how == "groups":  # two groups of the same ranks, met in different order
        groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in range(2)]
        layers = [make(moe_group=group) for group in groups]
        layers[int(odd)](x)


DISAGREEMENTS = {
    "skip": r"ranks \[0, 1\] do not exchange the same tokens; .*the layer \(rank 0: \d+, rank 1: \d+\)$",
    "dtype": r"they differ in the dtype of the tokens \(rank 0: torch\.float32, rank 1: torch\.float64\)$",
    "width": r"they differ in the elements of a token \(rank 0: 4, rank 1: 6\)$",
    "num_experts": r"experts of a rank, .*\) must be the same .*: rank 1 has \(\d+, 6, 3, 1, None, 'choice', "
    r"'full'\), the ",
    "bound": r"max_rows_per_rank, exchange, wire\) must be the same .*: rank 1 has \(\d+, 4, 2, 1, 16, 'choice', "
    r"'full'\), the others .*, 12, 'choice', 'full'\)$",
    "groups": r"^rank [01]: the exchange in the group of ranks \[0, 1\] failed: .* did not reach this layer.*"
    r"may end another by SIGABRT",
}


def every_disagreement():
    """Errors are those of this rank alone: the next disagreement starts from ranks in step."""
    for how, text in DISAGREEMENTS.items():
        with pytest.raises((RuntimeError, ValueError), match=text):
            disagree(how)


def test_disagreement_is_reported_on_every_rank(pool):
    pool.run(every_disagreement, world_size=2)


def die_in_the_middle():
    layer = make()
    for step in range(1000):
        if dist.get_rank() == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        layer(torch.randn(5, 4)).sum().backward()


def test_killed_rank_ends_the_others():
    with DistributedPool(2) as pool:
        pool.run(dist.barrier)  # starting the processes does not count
        began = time.monotonic()
        with pytest.raises(
            DistributedError, match=r"(?s)rank 0: .*rank 1: the process ended with exit code -9"
        ):
            pool.run(die_in_the_middle, timeout=900)
        assert time.monotonic() - began < 300


def descriptors_and_memory():
    return len(os.listdir("/proc/self/fd")), int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def many_steps():
    torch.manual_seed(0)
    layer = make(overlap_degree=2)
    for step in range(220):
        if step == 20:
            first = descriptors_and_memory()
        rows = int(torch.randint(0, 200, ()))
        layer(torch.randn(rows, 4) + torch.randn(4)).sum().backward()
    last = descriptors_and_memory()
    return last[0] - first[0], last[1] - first[1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_no_leak(pool):
    for descriptors, memory in pool.run(many_steps, world_size=2):
        assert descriptors == 0 and memory < 8 << 20


INTERRUPTED = """
import signal, sys
from pathlib import Path
import torch.distributed as dist
from fmoe_ext.testing import run_distributed

def wait(folder):
    Path(folder, f"rank {dist.get_rank()}").touch()
    signal.pause()

if __name__ == "__main__":
    run_distributed(wait, 2, sys.argv[1], timeout=600)
"""


def test_interrupt_leaves_no_process(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(INTERRUPTED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # a test run in the background may have been started with SIGINT ignored, which children inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while len([*tmp_path.glob("rank *")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=300) != 0
    while members(job.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not members(job.pid)


def members(session):
    """Processes of a session."""
    listed = subprocess.run(
        ["ps", "-eo", "sid=,pid=,stat="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [pid for sid, pid, state in rows if int(sid) == session and not state.startswith("Z")]
