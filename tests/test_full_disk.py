"""Writers on a full disk: one error that names the file, nothing half written beside it, and the older file is whole.

A limit on the size of files stands for the disk. More of them: checkpoint/test_savers_and_disks.py,
formats/test_formats_files.py (export), finetune/test_stream_activations.py, test_choice_log.py.
"""

import contextlib
import json
import resource

import numpy as np
import pytest
import torch

import fmoe_ext
from fmoe_ext.balance.cli import main as report
from fmoe_ext.checkpoint.files import atomic_file
from fmoe_ext.compat.megatron import checkpoint as megatron
from fmoe_ext.compress.cli import main as prune
from fmoe_ext.finetune.adapters import cli as adapter

pytestmark = pytest.mark.usefixtures("capsys")  # else stderr is a file, which the limit ends too


@contextlib.contextmanager
def room_for(num_bytes):
    """No file may grow beyond this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def unfinished(folder):
    return [path.name for path in folder.rglob("*") if ".tmp" in path.name or ".part" in path.name]


def test_file_is_named_and_the_older_one_stays(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("before")
    with (
        room_for(10),
        pytest.raises(OSError, match=r"File too large: '.*x\.json'"),
        atomic_file(path) as file,
    ):
        file.write(b"0" * 100)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_prune(kind, tmp_path):
    """The next call goes on with what is whole."""
    streamed = pytest.importorskip("tests.finetune.streamed_models", reason="pip install transformers")
    model, name = streamed.save(tmp_path / "model", num_hidden_layers=2), "model.safetensors"
    if kind == "gguf":
        pytest.importorskip("gguf", reason="pip install gguf")
        model = streamed.save(tmp_path / "wide", dtype=torch.float32, num_hidden_layers=2, **streamed.WIDE)
        model, _ = streamed.write_gguf(model, "q8_0")
        name = model.name
    tokens = torch.randint(3, 61, (200,), generator=torch.Generator().manual_seed(3))
    np.save(tmp_path / "ids.npy", tokens.numpy())
    line = [str(model), "--tokens", str(tmp_path / "ids.npy"), "--seq-len", "20", "--keep", "0.5"]
    line += ["-o", str(tmp_path / "out")]
    for num_bytes, file in ((100, "job.json"), (800, "scores.json"), (60_000, f"model/{name}")):
        with (
            room_for(num_bytes),
            pytest.raises(SystemExit, match=rf"error: .*{tmp_path}/\.out\.pruning/{file}"),
        ):
            prune(line)
        assert unfinished(tmp_path) == []
    assert prune(line) == 0
    assert json.loads((tmp_path / "out/prune_report.json").read_text())["experts_after"] == 3


def test_adapter_merge(tmp_path):
    models = pytest.importorskip("tests.checkpoint.adapter_models", reason="pip install peft")
    models.base("qwen3_moe", tmp_path / "base")
    models.trained("qwen3_moe", tmp_path / "adapter")
    line = ["merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    for num_bytes, file in ((100, "job.json"), (20_000, "model/model-00001-of")):
        with (
            room_for(num_bytes),
            pytest.raises(SystemExit, match=rf"error: .*{tmp_path}/\.out\.merging/{file}"),
        ):
            adapter.main(line)
        assert unfinished(tmp_path) == []
    assert adapter.main(line) == 0
    assert (tmp_path / "out/merge_report.json").exists()


def test_page_of_choices(tmp_path, capsys):
    mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
    with fmoe_ext.balance.log_choices(mlp, tmp_path / "log") as log:
        mlp(torch.randn(10, 8))
        log.end_step(0)
    page = tmp_path / "page.html"
    page.write_text("before")
    with room_for(1000):
        assert report(["report", str(tmp_path / "log"), "-o", str(page)]) == 2
    assert capsys.readouterr().err == f"error: [Errno 27] File too large: '{page}'\n"
    assert page.read_text() == "before" and unfinished(tmp_path) == []


def test_line_of_load_keeps_the_lines_before_it_whole(tmp_path):
    path = tmp_path / "load.jsonl"
    record = {"step": 0, "layers": {"gate": {"tokens_per_expert": [[1, 2]]}}}
    fmoe_ext.balance.write(record, path)
    with room_for(100), pytest.raises(OSError, match=r"File too large: '.*load\.jsonl'"):
        fmoe_ext.balance.write(record, path)
    fmoe_ext.balance.write({**record, "step": 1}, path)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_megatron_checkpoint_of_a_rank(tmp_path):
    path = tmp_path / "model_optim_rng.pt"
    megatron._write({"model": torch.zeros(3)}, path)
    with room_for(10_000), pytest.raises(OSError, match=rf"{path} cannot be written"):
        megatron._write({"model": torch.ones(10_000)}, path)
    assert torch.equal(torch.load(path)["model"], torch.zeros(3)) and list(tmp_path.iterdir()) == [path]
