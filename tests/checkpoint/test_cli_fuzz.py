"""The whole command line on damaged files: one line of error, exit status 2, nothing changed, no traceback."""

import contextlib
import hashlib
import io
import random
import shutil

import pytest
import torch
from safetensors.torch import save_file

from fmoe_ext import FMoETransformerMLP, SoftmaxGate, checkpoint
from fmoe_ext.checkpoint import convert
from fmoe_ext.checkpoint.cli import main
from tests.checkpoint.forged import VERSION_1

ROUNDS = 40
ODD = (
    b"",
    b"\0",
    b"\xff\xfe\x00",
    b"null",
    b"[]",
    b"{}",
    b"1e999",
    b"[" * 5000,
    b"\x80\x04.",
    b"PK\x03\x04" * 9,
)


def snapshot(folder):
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """{format: a good checkpoint of it}."""
    root = tmp_path_factory.mktemp("good")
    model = FMoETransformerMLP(
        4, 6, 5, "swiglu", bias=False, gate=lambda *a, **k: SoftmaxGate(*a, gate_bias=False, **k)
    )
    checkpoint.save(root / "fmoe_ext", model, torch.optim.Adam(model.parameters()), step=3)
    for format, *options in (("fastmoe", "--ranks", "2"), ("hf-qwen3_moe",)):
        main(["convert", str(root / "fmoe_ext"), "--to", format, "-o", str(root / format), *options])
    (root / "safetensors").mkdir()
    checkpoint.export_safetensors(root / "safetensors" / "model.safetensors", model)
    (root / "sharded").mkdir()
    save_file(model.state_dict(), root / "sharded" / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(model.state_dict(), "model-1.safetensors")}
    (root / "sharded" / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))
    shutil.copytree(VERSION_1, root / "version-1")
    shutil.copytree(VERSION_1 / "step-00000003", root / "torch_dist" / "iter_0000010")
    (root / "torch_dist" / "iter_0000010" / "manifest.json").unlink()
    (root / "torch_dist" / "latest_checkpointed_iteration.txt").write_text("10")
    return root


def damaged(folder, chance):
    """Damages one file of a folder in one of several ways."""
    file = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = bytearray(file.read_bytes())
    kind = chance.randrange(6)
    if kind == 0:
        file.write_bytes(chance.choice(ODD))
    elif kind == 1:
        file.write_bytes(content[: chance.randrange(len(content))])
    elif kind == 2:
        for _ in range(chance.randrange(1, 9)):
            content[chance.randrange(min(len(content), chance.choice((16, 400, 10**9))))] = chance.randrange(
                256
            )
        file.write_bytes(content)
    elif kind == 3:
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + chance.randbytes(chance.randrange(1, 40)) + content[place:])
    elif kind == 4:
        file.unlink()
    else:
        file.unlink()
        chance.choice(
            (file.mkdir, lambda: file.symlink_to("/dev/null"), lambda: file.symlink_to(file.name))
        )()


def run(*arguments):
    """(exit code, the text of the error) of the command line."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main([str(a) for a in arguments])
        except SystemExit as end:
            return (2, end.code) if isinstance(end.code, str) else (end.code, "")  # as fmoe_ext._cli.run
    return 0, ""


@pytest.mark.parametrize(
    "format", ["fmoe_ext", "fastmoe", "hf-qwen3_moe", "safetensors", "sharded", "version-1", "torch_dist"]
)
def test_damaged_files(sources, tmp_path, format):
    chance = random.Random(format)
    refused = 0
    for i in range(ROUNDS):
        folder, out = tmp_path / f"{i}", tmp_path / f"out-{i}"
        shutil.copytree(sources / format, folder)
        damaged(folder, chance)
        before = snapshot(folder)
        command = chance.choice(
            (
                ["inspect"],
                ["merge", "-o", out],
                *(["convert", "--to", to, "-o", out] for to in convert.FORMATS),
            )
        )
        options = chance.choice(([], ["--no-verify"]))
        code, text = run(command[0], folder, *command[1:], *options)
        assert snapshot(folder) == before, (i, command)
        if code != 0:
            refused += 1
            assert code == 2 and text.startswith("error: ") and "\n" not in text, (i, command, text)
            assert not out.exists() and not list(tmp_path.glob(".out*")), (i, command, text)
    assert refused >= ROUNDS // 3


def test_arguments_that_do_not_fit(sources, tmp_path):
    good, out = sources / "fmoe_ext", tmp_path / "out"
    (tmp_path / "file").write_text("")
    for arguments in (
        ("convert", good, "--to", "fastmoe", "-o", out, "--ranks", "0"),
        ("convert", good, "--to", "fastmoe", "-o", out, "--ranks", "-2"),
        ("convert", good, "--to", "fastmoe", "-o", out, "--ranks", "3"),
        ("convert", good, "--to", "fmoe_ext", "-o", tmp_path / "file" / "x"),
        ("convert", good, "--to", "hf-fused", "-o", tmp_path / "file"),
        ("merge", good, "-o", tmp_path),
        ("merge", good, good, "-o", out),
        ("merge", tmp_path / "file", "-o", out),
        ("inspect", sources / "fastmoe", "--mp-rank", "../.."),
        ("inspect", "a\0b"),
        ("inspect", "/dev/null"),
        ("inspect", tmp_path),
    ):
        before = snapshot(tmp_path)
        code, text = run(*arguments)
        assert code == 2 and text.startswith("error: ") and "\n" not in text, (arguments, code, text)
        assert snapshot(tmp_path) == before, arguments
