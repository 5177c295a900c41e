"""examples/pipe_images: CIFAR-10's binary files, and the same training under Pipe as unsharded."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pipe_images"


@pytest.fixture
def cifar(tmp_path):
    """Six images a file: the class, then a color for each channel, the first pixel aside."""
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        records = []
        for i in range(6):
            pixels = torch.tensor([40 * i, 100, 255 - 40 * i], dtype=torch.uint8).repeat_interleave(1024)
            pixels[0] = i
            records.append(bytes([i]) + bytes(pixels.tolist()))
        (tmp_path / name).write_bytes(b"".join(records))
    return tmp_path


def test_binary_files(cifar, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("images", None)
    import images

    (train, classes), (test, test_classes) = images.read_cifar(cifar)
    assert classes.tolist() == [*range(6), *range(6)] and test_classes.tolist() == list(range(6))
    assert train.shape == (12, 3, 32, 32)
    assert train[3, :, 31, 31].mul(255).round().tolist() == [120, 100, 135]
    assert test[5, 0, 0, 0] * 255 == 5 and test[5, 0, 0, 1] * 255 == 200
    with pytest.raises(SystemExit, match="has no data_batch"):
        images.read_cifar(EXAMPLE)
    sys.modules.pop("images", None)


@pytest.mark.long
def test_command(cifar):
    command = [sys.executable, "train.py", "--data", str(cifar), "--out", str(cifar / "out"), "--width", "4"]
    command += ["--steps", "6", "--batch-size", "10", "--balance", "size", "--lr", "0.01"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "19 layers" in done.stdout
    losses = re.findall(r"(?:Pipe|unsharded) +\| loss ([\d.]+) \| test accuracy ([\d.]+%)", done.stdout)
    assert len(losses) == 2 and losses[0] == losses[1]
    apart = re.search(r"largest difference of the losses: (\S+); of the accuracies: \+0.00%", done.stdout)
    assert float(apart[1]) < 1e-4
    assert (cifar / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--chunks 0", "--chunks must be more than 0, but is 0"),
        ("--steps -1", "--steps must be more than 0, but is -1"),
        ("--devices cpu nowhere", "--devices nowhere cannot be used here"),
    ],
)
def test_options_that_cannot_be(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    monkeypatch.delitem(sys.modules, "images", raising=False)
    train = importlib.import_module("train")
    del sys.modules["images"], sys.modules["train"]  # monkeypatch would bring them back
    with pytest.raises(SystemExit, match="2"):
        train.parse(arguments.split())
    assert message in capsys.readouterr().err
