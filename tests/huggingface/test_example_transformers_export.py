"""examples/transformers/upcycle_and_export.py, as it stands, from an empty folder."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.forked import run_file

pytest.importorskip("accelerate", reason="pip install accelerate")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples/transformers/upcycle_and_export.py"


@pytest.mark.long
def test_upcycle_and_export(tmp_path, monkeypatch):
    result = run_file(SCRIPT, "--steps", "10", cwd=tmp_path, timeout=500)
    assert result.returncode == 0, result.stderr
    assert "2 MLPs became MoE layers" in result.stdout
    assert float(re.search(r"off by (\S+) from the dense one", result.stdout)[1]) < 1e-4
    losses = [line.split()[2:] for line in result.stdout.splitlines() if ": loss " in line]
    assert len(losses) == 2 and float(losses[1][-1]) < float(losses[0][0])
    assert "plain Transformers has loaded a Qwen3MoeForCausalLM" in result.stdout
    assert float(re.search(r"the same logits: off by (\S+) of", result.stdout)[1]) < 1e-5
    names = sorted(file.name for file in (tmp_path / "out/upcycle/qwen3_moe").iterdir())
    assert names[:2] == ["README.md", "config.json"] and {"model.safetensors", "tokenizer.json"} < set(names)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "10"])
    with pytest.raises(SystemExit, match="exists already: give another --out"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
