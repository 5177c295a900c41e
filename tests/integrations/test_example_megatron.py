"""The example that `make train-megatron` runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="pip install megatron-core")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_train(tmp_path):
    options = {"steps": 3, "batch-size": 4, "seq-len": 16, "d-model": 16, "num-experts": 4, "out": tmp_path}
    options = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/megatron/train.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    assert "the losses are equal: the largest difference in 3 steps" in result.stdout
    assert "2 MLPs became MoE layers on 2 rank(s)" in result.stdout
    alone, spread = (
        [json.loads(line) for line in (tmp_path / f"metrics-{n}.jsonl").read_text().splitlines()]
        for n in (1, 2)
    )
    assert [row["step"] for row in alone] == [1, 2, 3]
    for a, b in zip(alone, spread, strict=True):
        assert 3 < a["loss"] < 7 and abs(a["loss"] - b["loss"]) < 1e-4
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]
