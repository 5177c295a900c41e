"""examples/pipeline_lm: the tutorial's model, and the command of `make train-pipeline` on a small text."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pipeline_lm"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("model", "text", "data", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import model

    yield model
    for name in ("model", "text", "data", "train"):
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


def test_losses_are_drawn_at_the_batches_that_were_trained(example):
    """With 5 batches an epoch and a line every 2, the last batch of an epoch has no line but counts."""
    train = importlib.import_module("train")
    trainer = train.Trainer.__new__(train.Trainer)
    trainer.options = SimpleNamespace(epochs=3, bptt=1, batches=5, log_interval=2)
    trainer.train_source, trainer.rank, trainer.optimizer = torch.zeros(2, 20), 0, mock.MagicMock()
    trainer.pipeline = mock.MagicMock()
    trainer.pipeline.train_step.return_value = torch.tensor(1.0)
    trainer.pipeline.module.state_dict.return_value = {}
    trainer.scheduler, trainer.text = mock.MagicMock(), mock.MagicMock()
    trainer.scheduler.get_last_lr.return_value = [0.1]
    trainer.num_trained, trainer.curve, trainer.valid_curve, trainer.traces = 0, [], [], []
    trainer.say, trainer.evaluate, trainer.draw = mock.Mock(), mock.Mock(return_value=1.0), mock.Mock()
    trainer.run()
    assert [batch for batch, _ in trainer.curve] == [2, 4, 7, 9, 12, 14]
    assert [batch for batch, _ in trainer.valid_curve] == [5, 10, 15]


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], marks=pytest.mark.slow, id="dense"),
        pytest.param(["--moe", "2", "--schedule", "zero_bubble_v"], marks=pytest.mark.long, id="moe"),
    ],
)
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
    del sys.modules["train"]  # monkeypatch would bring it back
    with pytest.raises(SystemExit, match="2"):
        train.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_text_that_is_not_there(example, tmp_path):
    from text import load_text

    with pytest.raises(SystemExit, match=r"nothing\.txt does not exist: give a text file or a folder"):
        load_text(str(tmp_path / "nothing.txt"), 10, 1)


def test_megabytes_are_the_text_that_is_read(example, tmp_path):
    """The option was taken and ignored."""
    from text import load_text

    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:09} " for i in range(10_000)))  # 100,000 bytes, the last 5 % for validation
    text = load_text(str(path), None, 0.002)
    assert text.words[1:] == [f"{i:09}" for i in range(200)]
    assert [len(part) for part in (text.train, text.valid, text.test)] == [200, 20, 20]
    assert len(load_text(str(path), None, 0).train) == 9500
