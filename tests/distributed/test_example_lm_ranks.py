"""examples/lm on several ranks: the numbers of one process, in every layout, also after a change of layout."""

import importlib
import os
import shutil
import signal
import sys

import pytest
import torch

from fmoe_ext.testing import DistributedPool
from tests.distributed.example_lm import (
    EXAMPLE,
    assert_same_checkpoint,
    assert_same_curve,
    metrics,
    train,
    write_text,
)
from tests.sweeps import rest_is_long

MOST = 1e-12  # relative difference, float64


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """Runs of one process, by the blocks that have experts."""
    outs = {moe_every: tmp_path_factory.mktemp("alone") for moe_every in (1, 2)}
    for moe_every, out in outs.items():
        assert train(text, out, "--compare", "--save-every=3", f"--moe-every={moe_every}") == 0
    return outs


@pytest.fixture(scope="module")
def pool():
    """Ranks of its own: torch's DTensor keeps the meshes of earlier tests, whose groups are gone."""
    with DistributedPool(4) as pool:
        yield pool


LAYOUTS = {
    "accumulated": (1, "--accumulate 3"),
    "accumulated, experts over ranks, a rank without windows": (4, "--accumulate 2 --expert-parallel 2"),
    "accumulated, fsdp2": (2, "--accumulate 2 --expert-parallel 2 --data-parallel fsdp2"),
    "data parallel": (2, "--expert-parallel 1"),
    "experts over ranks, overlapped": (2, "--expert-parallel 2 --overlap-degree 2"),
    "experts over ranks, a rank with fewer windows": (4, "--expert-parallel auto"),
    "both": (4, "--expert-parallel 2"),
    "fsdp2, whole experts": (2, "--expert-parallel 1 --data-parallel fsdp2"),
    "a pipeline": (2, "--pp 2 --chunks 4"),
    "a pipeline with copies of its stages": (4, "--pp 2 --chunks 3 --expert-parallel 1"),
    "a pipeline, experts over the ranks of a stage": (4, "--pp 2 --chunks 2 --expert-parallel 2"),
    "a pipeline, a stage without experts": (2, "--moe-every 2 --pp 2 --chunks 2"),
    "fsdp2, experts over ranks": (4, "--expert-parallel 2 --data-parallel fsdp2"),
}


# What the others combine.
QUICK = (
    "accumulated, experts over ranks, a rank without windows",
    "accumulated, fsdp2",
    "data parallel",
    "experts over ranks, overlapped",
    "fsdp2, whole experts",
    "a pipeline, experts over the ranks of a stage",
    "a pipeline, a stage without experts",
)


@pytest.mark.parametrize("name", rest_is_long(LAYOUTS, QUICK))
def test_every_layout_is_as_one_process(pool, alone, text, tmp_path, name):
    """And its checkpoint goes on in one process, one process's on these ranks."""
    ranks, arguments = LAYOUTS[name]
    moe_every = 2 if "--moe-every 2" in arguments else 1
    alone = alone[moe_every]
    arguments = ["--compare", f"--moe-every={moe_every}", *arguments.split()]
    status = pool.run(train, text, tmp_path / "out", *arguments, "--stop-after", "3", world_size=ranks)
    assert status == [0] * ranks
    shutil.copytree(tmp_path / "out", tmp_path / "continued")
    assert (
        train(
            text,
            tmp_path / "continued",
            "--resume",
            "--compare",
            f"--moe-every={moe_every}",
            "--data-parallel=ddp",
            "--expert-parallel=1",
            "--pp=1",
            "--accumulate=1",
        )
        == 0
    )
    assert_same_curve(tmp_path / "continued", alone, MOST)
    assert (tmp_path / "continued" / "sample.txt").read_text() == (alone / "sample.txt").read_text()

    first_half = stopped(alone, 3, tmp_path / "stopped")
    assert pool.run(train, text, first_half, "--resume", *arguments, world_size=ranks) == [0] * ranks
    assert_same_curve(first_half, alone, MOST)
    assert (first_half / "sample.txt").read_text() == (alone / "sample.txt").read_text()


def stopped(out, step, copy):
    """A run's folder as it was after a step with a checkpoint."""
    shutil.copytree(out, copy)
    (copy / "checkpoints" / "latest").write_text(f"step-{step:08d}")
    return copy


def test_resume_on_as_many_ranks_is_bitwise(pool, text, tmp_path):
    """Between two reports, with a gate that draws random numbers."""
    options = ["--gate=gshard", "--dtype=float32", "--log-every=2"]
    assert pool.run(train, text, tmp_path / "straight", *options, world_size=2) == [0, 0]
    for stop in ("3", "6"):
        command = [*options, "--resume=auto", "--stop-after", stop]
        assert pool.run(train, text, tmp_path / "resumed", *command, world_size=2) == [0, 0]
    assert_same_curve(tmp_path / "resumed", tmp_path / "straight", most=1e-15)  # sums in another order
    assert_same_checkpoint(tmp_path / "resumed", tmp_path / "straight")


def test_ranks_refuse_together(pool, text, tmp_path):
    refused = [
        "--expert-parallel 3",
        "--expert-parallel 4",
        "--accumulate 2 --gate gshard",
        "--resume",
        "--pp 3",
        "--pp 4",
    ]
    in_pipeline = ["--chunks 1", "--gate gshard", "--data-parallel fsdp2", "--profile", "--balance-weight 0"]
    in_pipeline.append("--accumulate 2")
    for arguments in refused + [f"--pp 2 --chunks 3 {argument}" for argument in in_pipeline]:
        command = text, tmp_path / "out", *arguments.split()
        assert pool.run(exit_status, *command, world_size=2) == [2] * 2, arguments
    assert not (tmp_path / "out").exists()


def exit_status(*arguments):
    try:
        return train(*arguments)
    except SystemExit as stop:
        return stop.code


def test_signal_to_one_rank_stops_all(pool, text, tmp_path):
    steps = pool.run(interrupted, text, tmp_path / "out", world_size=2)
    assert steps == [130, 130]
    (checkpoint,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == metrics(tmp_path / "out")[-1]["step"] <= 5


def interrupted(text, out):
    """train(), in which the second rank gets SIGTERM in its third step."""
    sys.path.insert(0, str(EXAMPLE))
    data = importlib.import_module("data")
    batch = data.Corpus.batch

    def batch_and_signal(corpus, step, *arguments):
        if step == 3 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(corpus, step, *arguments)

    data.Corpus.batch = batch_and_signal
    try:
        return train(text, out, "--steps=1000")
    finally:
        data.Corpus.batch = batch
