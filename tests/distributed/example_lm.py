"""Shared parts of the tests of examples/lm on several ranks."""

import importlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from fmoe_ext import cpu
from fmoe_ext.checkpoint import store
from fmoe_ext.checkpoint.manifest import Manifest

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm"
TINY = """
    --d-model=16 --num-layers=2 --num-heads=2 --num-experts=4 --d-hidden=8 --batch-size=6 --seq-len=16 --warmup=2
    --val-windows=5 --log-every=1 --val-every=3 --sample-bytes=8 --device=cpu --dtype=float64 --threads=1 --steps=6
    --peak-flops=1e9
"""
VALUES = ("loss", "grad_norm", "balance_loss", "val_loss")
COUNTS = ("step", "lr", "expert_load", "dropped_share")


def write_text(file):
    file.write_text("".join(f"{i} times {i} is {i * i}. All work and no play?\n" for i in range(300)))
    return file


def train(text, out, *arguments):
    """The exit status of the trainer, in this process or on the ranks of this one's group."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    trainer = importlib.import_module("train")
    threads = torch.get_num_threads()
    try:
        with (
            mock.patch.object(trainer, "write_pictures"),  # tests/test_example_lm.py looks at them
            mock.patch.object(cpu, "can_keep_memory", return_value=False),  # would outlive this test
        ):
            return trainer.main(["--data", str(text), "--out", str(out), *TINY.split(), *arguments])
    finally:
        torch.set_num_threads(threads)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def load_checkpoint(out):
    """(step, {name: tensor}) of the newest checkpoint."""
    path = store.find(out / "checkpoints")
    manifest = Manifest.read(path)
    stored = store.stored_tensors(path, manifest.saved(path))
    return manifest.step, {name: tensor.read() for name, tensor in stored.items()}


def assert_same_checkpoint(ours, other):
    (step, tensors), (other_step, others) = load_checkpoint(ours), load_checkpoint(other)
    assert step == other_step and tensors.keys() == others.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def assert_same_curve(ours, other, most):
    """most: relative difference of losses and norms."""
    assert [r["step"] for r in metrics(ours)] == [r["step"] for r in metrics(other)]
    for a, b in zip(metrics(ours), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for key in COUNTS:
            assert a.get(key) == b.get(key), (a["step"], key)
        for key in a.keys() & set(VALUES):
            assert abs(a[key] - b[key]) <= most * abs(b[key]), (a["run"], a["step"], key, a[key], b[key])
