"""The example that `make train-megatron` runs."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.forked import run_file
from tests.sweeps import one_is_long

pytest.importorskip("megatron.core", reason="pip install megatron-core")
ROOT = Path(__file__).resolve().parents[2]


def run(out, **options):
    options = {"steps": 3, "batch-size": 4, "seq-len": 16, "out": out} | options
    options = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    result = run_file(ROOT / "examples/megatron/train.py", *options, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows(out, name):
    return [json.loads(line) for line in (out / f"metrics-{name}.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_dense_model(tmp_path):
    said = run(tmp_path, **{"model": "dense", "d-model": 16, "num-experts": 4})
    assert "1 process and 2 processes: the losses are equal" in said
    assert "2 MLPs became MoE layers on 2 rank(s)" in said
    alone, spread = rows(tmp_path, 1), rows(tmp_path, 2)
    assert [row["step"] for row in alone] == [1, 2, 3]
    for a, b in zip(alone, spread, strict=True):
        assert 3 < a["loss"] < 7 and abs(a["loss"] - b["loss"]) < 1e-7
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]


@pytest.mark.parametrize("model", one_is_long(["deepseek_v3", "glm4_5", "qwen3_moe"]))
def test_model_by_megatrons_arguments(tmp_path, model):
    said = run(tmp_path, model=model)
    assert "Megatron's own and 1 process: the losses are equal" in said
    assert "1 process and 2 processes: the losses are equal" in said
    theirs, alone, spread = (rows(tmp_path, name) for name in ("megatron", 1, 2))
    assert len(theirs) == 3
    for a, b, c in zip(theirs, alone, spread, strict=True):
        assert 3 < a["loss"] < 7 and abs(a["loss"] - b["loss"]) < 1e-5 and abs(b["loss"] - c["loss"]) < 1e-7
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]
    assert theirs[0]["loss"] != theirs[1]["loss"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--model dense --num-experts 0", "--num-experts must be at least 1, but is 0"),
        ("--num-experts 4", "--num-experts is for --model dense: models/deepseek_v3.txt has"),
        ("--ep 2", "--ep is for torchrun"),  # was taken, and ignored
        ("--device cuda", "start it with torchrun"),
        ("--data nothing", "--data nothing does not exist"),
        # ended with "the losses differ": a process with more windows counted as much as one with fewer
        ("--batch-size 6", "--batch-size 6 must be a multiple of 2 * --microbatches 2"),
    ],
)
def test_options_that_cannot_be(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(str(ROOT / "examples/megatron"))
    before = sys.path[:]
    for name in ("train", "data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    train = importlib.import_module("train")
    with pytest.raises(SystemExit, match="2"):
        train.parse(arguments.split())
    assert message in capsys.readouterr().err
    sys.path[:] = before
    for name in ("train", "data"):
        del sys.modules[name]  # monkeypatch would bring it back
