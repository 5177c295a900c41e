"""examples/remote/train.py: the folder that it writes to. What it trains is `make train-remote`."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "remote" / "train.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_remote", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_takes_away_an_earlier_run_only(example, tmp_path):
    """`--out .` deleted whatever was there."""
    (tmp_path / "thesis.tex").write_text("years")
    (tmp_path / "curve.png").touch()
    with pytest.raises(
        ValueError, match=r"holds what no earlier run has left, as thesis\.tex: name a new folder"
    ):
        example.prepare(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "curve.png"}
    out = tmp_path / "a" / "out"
    example.prepare(out)
    (out / "etcd" / "member").mkdir(parents=True)
    for name in ("etcd.log", "server-0.log", "trainer-0.jsonl", "curve.png"):
        (out / name).touch()
    example.prepare(out)
    assert out.is_dir() and not list(out.iterdir())


def test_report_of_a_short_run(example, tmp_path, capsys):
    """With fewer than 20 steps both means were of all losses, divided by 20: nothing was ever learned."""
    record = {"seconds": 0.1, "failed": "", "lost": 0, "retries": 0, "applied": 3}
    path = tmp_path / "trainer-0.jsonl"
    path.write_text("".join(json.dumps({**record, "loss": loss}) + "\n" for loss in (4.0, 3.0, 2.0, 1.0)))
    assert example.report([path], 3, tmp_path)
    assert "loss 3.500 -> 1.500 in 4 steps" in capsys.readouterr().out
    assert not example.report([path], 2, tmp_path)
