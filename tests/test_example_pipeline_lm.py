"""examples/pipeline_lm: the tutorial's model, and the command of `make train-pipeline` on a small text."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pipeline_lm"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("model", "text", "data"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import model

    yield model
    for name in ("model", "text", "data"):
        sys.modules.pop(name, None)


def test_parameters_of_the_tutorial(example):
    with torch.device("meta"):
        model = example.make_model(example.ModelConfig())
    assert sum(p.numel() for p in model.parameters()) == 1_041_453_167


def test_no_word_sees_the_next(example):
    config = example.ModelConfig(50, 16, 24, 2, 2, dropout=0.0, num_experts=4)
    model = example.make_model(config).double()
    tokens = torch.randint(50, (2, 7))
    changed = tokens.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :4], model(changed)[:, :4], rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("extra", [[], ["--moe", "2", "--schedule", "zero_bubble_v"]], ids=["dense", "moe"])
def test_command(tmp_path, extra):
    for part, count in (("train", 900), ("valid", 200), ("test", 200)):
        (tmp_path / f"wiki.{part}.tokens").write_text(
            " ".join(f"w{i * i % 7} w{i % 5}" for i in range(count))
        )
    small = "--d-model 16 --d-hidden 16 --num-layers 4 --num-heads 2 --epochs 2 --batches 4 --batch-size 6 --bptt 5"
    command = [
        sys.executable,
        "train.py",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        *small.split(),
    ]
    command += ["--log-interval", "2", "--lr", "0.01", *extra]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"\[RANK 2\]: \| epoch   1 \|     2/    4 batches \| lr 0.01 \| ms/batch .* \| ppl ", done.stdout
    )
    assert re.search(
        r"\[RANK 3\]: \| end of epoch   2 \| time: .*s \| valid loss .* \| valid ppl ", done.stdout
    )
    losses = [float(x) for x in re.findall(r"\[RANK 2\]: \| epoch .* loss +([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0]
    assert "| End of training | test loss" in done.stdout and "=" * 89 in done.stdout
    for name in ("trace.png", "loss.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--ranks 0", "--ranks must be more than 0, but is 0"),  # ended with status 0, nothing done
        ("--num-layers -2", "--num-layers must be more than 0, but is -2"),  # trained a model without layers
        ("--batch-size 0", "--batch-size must be more than 0, but is 0"),
        ("--lr nan", "--lr must be more than 0, but is nan"),
        ("--batches -1", "--batches must be at least 0, but is -1"),
        ("--ranks 3 --pp 2", "--ranks 3 is not a multiple of --pp 2"),
    ],
)
def test_options_that_cannot_be(example, monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    train = importlib.import_module("train")
    monkeypatch.delitem(sys.modules, "train")
    with pytest.raises(SystemExit, match="2"):
        train.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_text_that_is_not_there(example, tmp_path):
    from text import load_text

    with pytest.raises(SystemExit, match=r"nothing\.txt does not exist: give a text file or a folder"):
        load_text(str(tmp_path / "nothing.txt"), 10, 1)
