"""make finetune with fewer steps, from an empty folder; the rows that --text leaves for the comparison."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.forked import run_file

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/finetune/finetune.py"), *arguments],
        cwd=folder,
        # one thread: beside another test, two that wait for each other take ten times as long
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.long
def test_small_model_passes_every_check(tmp_path):
    result = run(tmp_path, "--steps", "30", "--making-steps", "60")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert sum(line.startswith("ok ") for line in lines) == 6 and "FAILED" not in result.stdout
    assert (tmp_path / "out/finetune/finetune.png").stat().st_size > 10_000


@pytest.mark.long
def test_comparison_that_fails_is_the_exit_status(tmp_path):
    result = run(tmp_path, "--steps", "2", "--making-steps", "2", "--lr", "0")
    assert result.returncode == 1 and "FAILED loss of the held-out text" in result.stdout


def test_model_needs_a_text(tmp_path):
    result = run_file(ROOT / "examples/finetune/finetune.py", "--model", "folder", cwd=tmp_path)
    assert result.returncode == 2 and "--model needs --text FILE" in result.stderr


@pytest.mark.slow
def test_experts_that_exceed_the_memory_of_the_process(tmp_path):
    result = run(tmp_path, "--limit", "320MiB")
    assert result.returncode == 0, result.stdout + result.stderr
    assert sum(line.startswith("ok ") for line in result.stdout.splitlines()) == 4
    assert (tmp_path / "out/finetune/finetune.png").stat().st_size > 10_000


def test_limit_is_of_the_model_that_is_made(tmp_path):
    arguments = ("--model", "folder", "--text", "text", "--limit", "1GiB")
    result = run_file(ROOT / "examples/finetune/finetune.py", *arguments, cwd=tmp_path)
    assert result.returncode == 2 and "--model FOLDER takes --memory" in result.stderr


def test_held_out_rows_are_not_trained(tmp_path, monkeypatch):
    """Of 200 rows the first 4 of the last 10 were held out, and all but the last 4 were trained."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/finetune"))
    finetune = importlib.import_module("finetune")
    ids = torch.arange(800)[None]
    tokenizer = mock.Mock(return_value=SimpleNamespace(input_ids=ids))
    monkeypatch.setattr(finetune.transformers.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    stream = mock.Mock(pool=SimpleNamespace(layers=[]), statistics=SimpleNamespace(hidden_share=0.0))
    model = mock.Mock(expert_stream=stream)
    monkeypatch.setattr(finetune.fmoe_ext, "stream", lambda *_: model)
    monkeypatch.setattr(finetune, "adapt", lambda model, rank: model)
    train, loss_of = mock.Mock(), mock.Mock(return_value=1.0)
    for name, function in (("train", train), ("loss_of", loss_of), ("draw", mock.Mock())):
        monkeypatch.setattr(finetune, name, function)
    (tmp_path / "text").write_text("")
    options = SimpleNamespace(model="", text=tmp_path / "text", memory="auto", rank=1, length=4)
    assert finetune.real_run(options, tmp_path) == 0
    rows, held_out = train.call_args.args[1], loss_of.call_args.args[1]
    assert torch.equal(torch.cat((rows, held_out)), ids.view(200, 4)) and len(held_out) == 4
    for name in ("finetune", "small"):
        del sys.modules[name]
