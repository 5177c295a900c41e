"""`fmoe prune`: files in, files out, a killed call, and what is refused."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fmoe_ext.compress.cli import main
from tests.finetune.streamed_models import resident, save
from tests.forked import run_python

ROOT = Path(__file__).resolve().parents[2]
FEW = {"num_hidden_layers": 2}


def ids(count=600):
    return torch.randint(3, 61, (count,), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def given(tmp_path):
    """Arguments of the command for a small model and its tokens."""
    save(tmp_path / "model", **FEW)
    np.save(tmp_path / "ids.npy", ids().numpy())
    return [
        str(tmp_path / "model"), "--tokens", str(tmp_path / "ids.npy"), "--seq-len", "20",
        "-o", str(tmp_path / "out"), "--batch", "2",
    ]  # fmt: skip


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_command_writes_a_model_a_report_and_a_page(given, tmp_path, capsys):
    before = contents(tmp_path / "model")
    assert main([*given, "--keep", "0.5"]) == 0
    said = capsys.readouterr()
    report = json.loads((tmp_path / "out/prune_report.json").read_text())
    assert f"loss before {report['loss_before']:.4f}, after {report['loss_after']:.4f}" in said.out
    assert "reading part 14 of 14 of the text" in said.err
    page = (tmp_path / "out/prune_report.html").read_text()
    for path, layer in report["layers"].items():
        assert path in page and len(layer["kept"]) == 3 and len(layer["pruned"]) == 3
    assert f"<b>{report['loss_after']:.4f}</b><span>loss after</span>" in page
    assert contents(tmp_path / "model") == before
    assert {path.name for path in tmp_path.iterdir()} == {"model", "ids.npy", "out"}
    with torch.no_grad():
        rows = ids()[-60:].view(3, 20)
        losses = [resident(tmp_path / "out")(input_ids=r[None], labels=r[None]).loss.item() for r in rows]
    assert sum(losses) / 3 == pytest.approx(report["loss_after"], rel=1e-12)


def test_text_is_read_by_the_tokenizer_of_the_folder(given, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in ids().tolist()))
    main([*given, "--experts", "4", "--json"])
    expected = json.loads(capsys.readouterr().out)
    arguments = [str(tmp_path / "text.txt") if a.endswith("ids.npy") else a for a in given]
    arguments[arguments.index("--tokens")] = "--text"
    arguments[arguments.index("-o") + 1] = str(tmp_path / "other")
    main([*arguments, "--experts", "4", "--json"])
    assert json.loads(capsys.readouterr().out) == expected
    assert contents(tmp_path / "other") == contents(tmp_path / "out")
    assert "tokenizer.json" in contents(tmp_path / "out")


def test_folder_without_a_tokenizer_is_refused(given, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words")
    at = given.index("--tokens")
    with pytest.raises(SystemExit, match="give --tokens, a file of ids"):
        main([*given[:at], "--text", str(tmp_path / "text.txt"), *given[at + 2 :], "--keep", "0.5"])
    assert not (tmp_path / "out").exists()


def test_dry_run_prints_the_report_alone(given, tmp_path, capsys):
    at = given.index("-o")
    assert main([*given[:at], *given[at + 2 :], "--keep", "0.5", "--dry-run"]) == 0
    assert "6 -> 3 experts a layer by reap; nothing was written" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"model", "ids.npy"}


# Forks a process for each line at which one kills itself with SIGKILL, so that Transformers is imported once.
KILLED = """
import json, os, signal, sys
from fmoe_ext.compress import cli
import transformers
prune = cli.prune
def killed(at):
    def run(*inputs, say, **options):
        until = lambda line: os.kill(os.getpid(), signal.SIGKILL) if line.startswith(at) else say(line)
        return prune(*inputs, say=until, **options)
    return run
for at, arguments in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        cli.prune = killed(at)
        try:
            cli.main(arguments)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_killed_call_goes_on_to_the_same_bytes(given, tmp_path, capsys):
    def to(name):
        return [*given[: given.index("-o")], "-o", str(tmp_path / name), "--batch", "2", "--keep", "0.5"]

    outs = {"reading part 5": "a", "held-out sequence 2": "b", "writing": "c"}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_python(KILLED, json.dumps([(at, to(out)) for at, out in outs.items()]), env=env, timeout=300)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * 3, done.stderr
    assert main(to("whole")) == 0
    capsys.readouterr()
    for at, out in outs.items():
        unfinished = tmp_path / f".{out}.pruning"
        assert not (tmp_path / out).exists() and unfinished.is_dir()
        (unfinished / ".model.safetensors.1-abc.tmp").write_bytes(b"of a killed process")
        assert main(to(out)) == 0
        said = capsys.readouterr().err
        assert "reading part 4 " not in said and ("reading part 5 " in said) == (at == "reading part 5"), at
        assert contents(tmp_path / out) == contents(tmp_path / "whole"), at
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_parts_of_another_call_are_refused(given, tmp_path, capsys):
    (tmp_path / ".out.pruning").mkdir()
    (tmp_path / ".out.pruning/job.json").write_text('{"about": {"keep": 2}}')
    with pytest.raises(SystemExit, match="holds parts of another job: remove it, or give another folder"):
        main([*given, "--keep", "0.5"])


def test_heads_for_further_tokens_stay(given, tmp_path, capsys):
    """tests/compress/test_prune_heads.py has every architecture."""
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    extra = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | extra | {"model.layers.2.eh_proj.weight": torch.ones(4, 4)}, file, {"format": "pt"})
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    main([*given, "--keep", "0.5"])
    assert (
        "heads for further tokens: experts by the norms of their weights, 1 layers" in capsys.readouterr().out
    )
    report = json.loads((tmp_path / "out/prune_report.json").read_text())
    assert [*report["heads"]] == ["model.layers.2.mlp.experts"]
    assert "The text does not reach the 1 layers of heads" in (tmp_path / "out/prune_report.html").read_text()
    after = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(after["model.layers.2.eh_proj.weight"], torch.ones(4, 4))
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"--tokens": "missing.npy"}, "missing.npy does not exist"),
        (
            {"--seq-len": "500"},
            "the text has 600 tokens, of which 0 in whole sequences of 500 are left to measure",
        ),
        ({"--experts": "1"}, "a token chooses 2 experts, so 1 are too few"),
        ({"--memory": "1KB"}, "is too little"),
        ({"--held-out": "1"}, "held_out must be from 0 to below 1"),
        ({"--tokenizer": "other"}, "--tokenizer is of --text"),
    ],
)
def test_bad_input_is_one_sentence(given, tmp_path, changes, message):
    arguments = [*given, "--experts", "3"]
    for name, value in changes.items():
        arguments += [name, value] if name not in arguments else []
        arguments[arguments.index(name) + 1] = value
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.pruning").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("[[1, 2]]", "must have token ids in one row of integers"),
        ("[1.5]", "must have token ids in one row of integers"),
        ("{", "is no NumPy file and no JSON list"),
        ("[" + "70, " * 700 + "1]", "the text has token 70, but the model a vocabulary of 61"),
    ],
)
def test_file_that_has_no_tokens_of_the_model_is_refused(given, tmp_path, content, message):
    (tmp_path / "ids.json").write_text(content)
    arguments = [a.replace("ids.npy", "ids.json") for a in given]
    with pytest.raises(SystemExit, match=message):
        main([*arguments, "--keep", "0.5"])


def test_tied_routers_are_refused(given, tmp_path, monkeypatch):
    from transformers import Qwen3MoeForCausalLM

    config = json.loads((tmp_path / "model/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    tied = {"model.layers.1.mlp.gate.weight": "model.layers.0.mlp.gate.weight"}
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_tied_weights_keys", tied)
    with pytest.raises(SystemExit, match=r"model\.layers\.[01]\.mlp\.gate\.weight is tied to another weight"):
        main([*given, "--keep", "0.5"])


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_config_that_names_single_experts_is_refused(given, tmp_path, name):
    file = tmp_path / "model" / name
    config = json.loads(file.read_text()) if file.exists() else {}
    config["modules_to_skip"] = ["model.layers.0.mlp.experts.3.down_proj"]
    file.write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=rf": {name} names single experts"):
        main([*given, "--keep", "0.5"])
