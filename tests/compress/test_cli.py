"""`fmoe prune`: the command writes what prune() writes, goes on after a kill, and says what it cannot do."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fmoe_ext.compress.cli import main
from tests.integrations.streamed_models import save

LETTERS = [chr(ord("A") + i) for i in range(61)]
FEW = {"num_hidden_layers": 2}
PRUNE = (sys.executable, "-c", "import fmoe_ext_command; fmoe_ext_command.main()", "prune")


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer of one letter a token."""
    path = save(tmp_path / "model", **FEW)
    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="A"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="A").save_pretrained(path)
    return path


def ids(count=600):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def run(folder, out, *options, text=None):
    given = [str(folder), str(out), "--seq-len", "20", "--quiet", "--memory", "1GiB"]
    if text is not None:
        file = folder.parent / "text.txt"
        file.write_text(text)
        given += ["--text", str(file)]
    return main([*given, *options])


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_text_and_tokens_give_the_same_model(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "a", "--keep", "0.5", text="".join(LETTERS[i] for i in ids())) == 0
    said = capsys.readouterr().out
    np.save(tmp_path / "ids.npy", np.array(ids(), dtype=np.uint16))
    assert run(folder, tmp_path / "b", "--experts", "3", "--tokens", str(tmp_path / "ids.npy"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert said.startswith("6 -> 3 experts a layer, by reap on 540 tokens\n")
    assert f"held-out loss {report['loss_before']:.4f} -> {report['loss_after']:.4f}" in said
    page = (tmp_path / "a" / "prune_report.html").read_text()
    assert f"<b>{report['loss_after']:.4f}</b><span>loss after</span>" in page
    for path, layer in report["layers"].items():
        assert f"<td class=left>{path}</td><td>3</td><td>{layer['lost_mass']:.2%}</td>" in page
        assert len(layer["scores"]) == 6 and sorted([*layer["kept"], *map(int, layer["pruned"])]) == [
            *range(6)
        ]


def test_dry_run_keeps_scores_and_another_keep_measures_nothing(folder, tmp_path, capsys):
    text = "".join(LETTERS[i] for i in ids())
    assert run(folder, tmp_path / "out", "--keep", "0.5", "--dry-run", text=text) == 0
    assert "nothing was written (--dry-run)" in capsys.readouterr().out
    assert (tmp_path / "out.scores.json").exists() and not (tmp_path / "out").exists()
    given = [str(folder), str(tmp_path / "out"), "--seq-len", "20", "--text", str(tmp_path / "text.txt")]
    assert main([*given, "--experts", "4"]) == 0
    said = capsys.readouterr().err
    assert "540 of 540 tokens have scores in" in said and "measured" not in said


def test_killed_command_goes_on_and_writes_the_same_bytes(folder, tmp_path):
    np.save(tmp_path / "ids.npy", np.array(ids()))
    options = ["--keep", "0.5", "--seq-len", "20", "--batch", "9", "--tokens", str(tmp_path / "ids.npy")]
    with subprocess.Popen(
        [*PRUNE, str(folder), str(tmp_path / "a"), *options], stderr=subprocess.PIPE, text=True
    ) as first:
        for line in first.stderr:
            if line.startswith("measured 180 of 540"):
                os.kill(first.pid, signal.SIGKILL)
                break
        assert first.wait() == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
    again = subprocess.run(
        [*PRUNE, str(folder), str(tmp_path / "a"), *options], capture_output=True, text=True, check=True
    )
    whole = main([str(folder), str(tmp_path / "b"), "--quiet", *options])
    assert whole == 0 and contents(tmp_path / "a") == contents(tmp_path / "b")
    begun = [line for line in again.stderr.splitlines() if "tokens have scores" in line]
    assert begun in ([f"{n} of 540 tokens have scores in {tmp_path / 'a.scores.json'}"] for n in (180, 360))


@pytest.mark.parametrize(
    ("options", "text", "sentence"),
    [
        (
            ["--keep", "0.5"],
            "abc",
            "the text has 3 tokens, of which 0 in whole sequences of 20 are left to measure",
        ),
        (["--keep", "0.1"], None, "a token chooses 2 experts, so 1 are too few"),
        (["--experts", "9"], None, "the model has 6 experts a layer, so 9 cannot stay"),
        (["--keep", "0.5", "--scores", "{folder}/config.json"], None, "has scores of another model or text"),
    ],
)
def test_refusals_are_a_sentence_and_write_nothing(options, text, sentence, folder, tmp_path, capsys):
    options = [option.format(folder=folder) for option in options]
    before = contents(folder)
    assert run(folder, tmp_path / "out", *options, text=text or "".join(LETTERS[i] for i in ids())) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and sentence in said and said.count("\n") == 1
    assert contents(folder) == before and not (tmp_path / "out").exists()


def test_ids_beyond_the_vocabulary_and_other_files_are_refused(folder, tmp_path, capsys):
    file = tmp_path / "ids.npy"
    np.save(file, np.array([*ids(), 61]))
    assert run(folder, tmp_path / "out", "--keep", "0.5", "--tokens", str(file), "--seq-len", "601") == 2
    np.save(file, np.array([*ids(599), 61]))
    assert run(folder, tmp_path / "out", "--keep", "0.5", "--tokens", str(file)) == 2
    assert "the tokens are from 3 to 61, but the model has words 0 to 60" in capsys.readouterr().err
    np.save(file, np.zeros((2, 300), dtype=np.int64))
    assert run(folder, tmp_path / "out", "--keep", "0.5", "--tokens", str(file)) == 2
    assert "must have one row of integers" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert run(folder, tmp_path / "out", "--keep", "0.5", text="ab") == 2
    assert "text.txt: give --tokens" in capsys.readouterr().err
