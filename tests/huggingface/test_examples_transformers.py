"""The scripts under examples/transformers, from an empty folder."""

import re
from pathlib import Path

import pytest

from tests.forked import run_file

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


def run(name, folder, *arguments):
    result = run_file(ROOT / "examples/transformers" / name, *arguments, cwd=folder, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_peft_experts(tmp_path):
    pytest.importorskip("peft")
    out = run("peft_experts.py", tmp_path)
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) in", out).groups())
    assert first > 4 and last < first - 1
    assert "saved, loaded: logits equal" in out
    assert float(re.search(r"difference of logits (\S+)", out)[1]) < 1e-4


@pytest.mark.long
def test_help_trains_nothing(tmp_path):
    """`--help` was the name of the folder."""
    assert "usage: qwen3_moe_ep.py [-h] [folder]" in run("qwen3_moe_ep.py", tmp_path, "--help")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_qwen3_moe_ep(tmp_path):
    out = run("qwen3_moe_ep.py", tmp_path)
    first, last = map(float, re.findall(r"loss (\S+)", out))
    assert first > 4 and last < first - 1
    assert out.count("one process that loaded the model writes the same") == 2
    assert not (tmp_path / "out/qwen3_moe_ep/store").exists()
