"""The comparison that `make train-ep` runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_train_ep(tmp_path):
    options = ["--ranks", "2", "--steps", "3", "--seq-len", "16", "--num-experts", "4", "--out"]
    command = [sys.executable, str(ROOT / "examples/lm/train_ep.py"), *options, str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"^ +3 +(\S+) +(\S+)", result.stdout, re.MULTILINE)[0]
    assert abs(float(losses[0]) - float(losses[1])) < 1e-9 and 1 < float(losses[0]) < 8
    assert "2 ranks, experts over 2" in result.stdout
    assert "the loss curves are equal" in result.stdout
