"""make grpo, some batches of it: what is generated is what TRL's GRPOTrainer trains, to the bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sweeps import rest_is_slow

pytest.importorskip("trl", reason="pip install trl")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("dtype", rest_is_slow(["bfloat16", "float32"], ["bfloat16"]))
def test_trained_log_probabilities_are_those_sampled(dtype, tmp_path):
    arguments = ["--batches", "3", "--making-steps", "10", "--dtype", dtype]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/grpo/grpo.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads((tmp_path / "out/grpo/grpo.json").read_text())["runs"]
    records = runs["batch_invariant()"]["records"]
    assert [(r["kl"], r["largest"], r["equal"]) for r in records] == [(0, 0, 1)] * 3
    assert len(runs["usual"]["records"]) == 3
    assert (tmp_path / "out/grpo/grpo.png").stat().st_size > 10_000
