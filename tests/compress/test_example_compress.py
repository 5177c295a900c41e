"""make compress with fewer steps, from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # .ci/run has the commands of docs/compress.md
def test_small_model_passes_every_check(tmp_path):
    steps = ["--making-steps", "80", "--healing-steps", "20"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/compress/compress.py"), *steps],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(line.startswith("ok ") for line in done.stdout.splitlines()) == 10
    assert (tmp_path / "out/compress/compress.png").stat().st_size > 10_000
