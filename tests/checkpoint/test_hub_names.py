"""Names of repositories: read from the hub's cache, refused with the command that downloads them, never downloaded."""

import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch

import fmoe_ext
from fmoe_ext import huggingface, info
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.cli import main as checkpoint_command
from fmoe_ext.checkpoint.model_folder import local_path
from fmoe_ext.compress.cli import main as prune_command
from fmoe_ext.doctor.cli import main as doctor_command
from fmoe_ext.doctor.subject import read as read_subject
from fmoe_ext.finetune.adapters.cli import main as adapter_command
from fmoe_ext.planning.cli import main as pipeline_command

transformers = pytest.importorskip("transformers")
constants = pytest.importorskip("huggingface_hub.constants")

NAME, SHA = "Small/Qwen3-MoE.v1", "0" * 39 + "a"
IDS = torch.arange(12).view(1, -1)
SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "intermediate_size": 32},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of two shards, its logits, and an adapter of its experts."""
    folder = tmp_path_factory.mktemp("saved")
    config = transformers.Qwen3MoeConfig(**SMALL)
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    with torch.no_grad():
        return folder / "model", model(IDS).logits


def put_into_cache(cache, folder, name=NAME):
    """Copies a folder into a cache as the hub's client lays it out -> the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / SHA, repository / "blobs"
    for made in (snapshot, blobs, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(SHA)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and an empty current folder; a call of the network fails the test even where it is caught."""
    calls = []

    def refuse(*args, **_):
        calls.append(args)
        raise OSError("this test has no network")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for owner, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (socket, "create_connection")):
        monkeypatch.setattr(owner, name, refuse)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "hub"
    assert not calls


def message_of(call, capsys):
    """The text of a CheckpointError, or what a command says when it ends."""
    try:
        status = call()
    except CheckpointError as error:
        return str(error)
    except SystemExit as end:
        return str(end.code)
    assert status == 2
    return capsys.readouterr().err


def doors(name):
    """Every way to a model, by what it is called."""
    Path("ids.json").write_text(json.dumps([i % 64 for i in range(400)]))
    return {
        "stream": lambda: fmoe_ext.stream(name),
        "import_model": lambda: fmoe_ext.import_model(name),
        "inspect": lambda: checkpoint_command(["inspect", name]),
        "merge": lambda: checkpoint_command(["merge", name, "-o", "merged.safetensors"]),
        "adapter": lambda: adapter_command(["check", name]),
        "base": lambda: adapter_command(["merge", "adapter", "--base", name, "-o", "merged"]),
        "doctor": lambda: doctor_command([name]),
        "prune": lambda: prune_command(
            [name, "--tokens", "ids.json", "--experts", "2", "--seq-len", "16", "-o", "smaller"]
        ),
        "load": lambda: fmoe_ext.checkpoint.load(name, fmoe_ext.FMoETransformerMLP(4, 8, 16)),
        "from_pretrained": lambda: huggingface.from_pretrained(name),
        "export": lambda: fmoe_ext.export(imported(), "exported", "qwen3_moe", tokenizer=name),
        "plan": lambda: pipeline_command(["plan", "--model", name, "--ranks", "1", "--batch", "2"]),
        "info": lambda: info.main([name, "--tflops", "1"]),
    }


DOORS = (
    *("stream", "import_model", "inspect", "merge", "adapter", "base", "doctor", "prune"),
    *("load", "from_pretrained", "export", "plan", "info"),
)
OF_OTHER_FILES = ("adapter", "base", "doctor", "export", "plan")  # than the weights


def imported():
    config = transformers.Qwen3MoeConfig(**SMALL)
    return fmoe_ext.import_model(transformers.Qwen3MoeForCausalLM(config))


def save_adapter(folder, rank=2):
    """An adapter of PEFT of one layer's experts."""
    from safetensors.torch import save_file

    folder.mkdir()
    prefix = "base_model.model.model.layers.0.mlp.experts"
    generator = torch.Generator().manual_seed(1)
    shapes = {"": (32, 32), "base_layer.": (64, 32)}  # down_proj [E, 32, 32], gate_up_proj [E, 64, 32]
    tensors = {}
    for place, (rows, columns) in shapes.items():
        tensors[f"{prefix}.{place}lora_A.weight"] = torch.randn(4 * rank, columns, generator=generator)
        tensors[f"{prefix}.{place}lora_B.weight"] = torch.randn(rows, 4 * rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_names_in_the_cache_are_read_like_folders(saved, cache, capsys):
    folder, logits = saved
    snapshot = put_into_cache(cache, folder)
    for read in (fmoe_ext.stream, fmoe_ext.import_model):
        model = read(NAME)
        torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
        assert model.name_or_path == model.config.name_or_path == NAME  # what PEFT notes
    checkpoint_command(["inspect", NAME, "--json"])
    files = json.loads(capsys.readouterr().out)["files"]
    assert sorted(files) == sorted(str(file) for file in snapshot.glob("*.safetensors"))
    subject = read_subject(NAME)
    assert type(subject.model).__name__ == "Qwen3MoeForCausalLM"
    assert doors(NAME)["prune"]() == 0
    assert len(json.loads(Path("smaller/prune_report.json").read_text())["layers"]) == 2
    assert fmoe_ext.stream("smaller").config.num_experts == 2


def test_names_are_loaded_planned_and_described_like_folders(saved, cache, tmp_path, capsys):
    folder, logits = saved
    shutil.copytree(folder, tmp_path / "with_tokenizer")
    (tmp_path / "with_tokenizer" / "tokenizer.json").write_text("{}")
    snapshot = put_into_cache(cache, tmp_path / "with_tokenizer")
    model = imported()
    fmoe_ext.checkpoint.load(NAME, model)
    torch.testing.assert_close(model(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
    fmoe_ext.export(model, "exported", "qwen3_moe", tokenizer=NAME)
    assert Path("exported/tokenizer.json").read_text() == "{}"
    for command in (
        lambda model: pipeline_command(["plan", "--model", model, "--ranks", "2", "--batch", "2", "--json"]),
        lambda model: info.main([model, "--tflops", "1", "--memory", "1GiB", "--json"]),
    ):
        texts = []
        for model in (NAME, str(snapshot)):
            command(model)
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and len(json.loads(texts[0])) >= 2


def test_fmoefied_models_are_loaded_by_name(cache, tmp_path):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SMALL.items() if "experts" not in name and "moe" not in name}
    model = fmoe_ext.fmoefy(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)), 4).eval()
    model.save_pretrained(tmp_path / "saved")
    put_into_cache(cache, tmp_path / "saved")
    assert torch.equal(huggingface.from_pretrained(NAME)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_adapters_and_their_base_are_named(saved, cache, tmp_path, capsys):
    put_into_cache(cache, saved[0])
    save_adapter(tmp_path / "adapter")
    put_into_cache(cache, tmp_path / "adapter", "some/adapter")
    for adapter, base, out in (("some/adapter", NAME, "named"), (tmp_path / "adapter", saved[0], "given")):
        given = [str(adapter), "--packing", "rank_major", "--base", str(base)]
        assert adapter_command(["merge", *given, "-o", out]) == 0
        assert adapter_command(["check", *given]) == 0
    names = sorted(file.name for file in Path("given").glob("*.safetensors"))
    assert len(names) > 1
    for name in names:
        assert Path("named", name).read_bytes() == Path("given", name).read_bytes()
    (cache / "models--some--adapter/snapshots" / SHA / "adapter_model.safetensors").unlink()
    said = message_of(lambda: adapter_command(["check", "some/adapter"]), capsys)
    assert "lacks adapter_model.safetensors" in said
    assert "hf download some/adapter`" in said


@pytest.mark.parametrize("door", DOORS)
def test_names_that_are_not_in_the_cache(door, cache, tmp_path, capsys):
    save_adapter(Path("adapter"))
    said = message_of(doors(NAME)[door], capsys)
    assert f"{NAME} does not exist" in said
    assert f"run `hf download {NAME}`" in said


def unlink_link(snapshot, name):
    (snapshot / name).unlink()


def unlink_blob(snapshot, name):
    Path(os.path.realpath(snapshot / name)).unlink()


SHARD = "model-00002-of-"


@pytest.mark.parametrize("door", [door for door in DOORS if door not in OF_OTHER_FILES])
def test_part_of_a_model_is_refused(door, saved, cache, capsys):
    snapshot = put_into_cache(cache, saved[0])
    shard = next(file.name for file in snapshot.iterdir() if file.name.startswith(SHARD))
    unlink_link(snapshot, shard)
    said = message_of(doors(NAME)[door], capsys)
    assert f"only a part of {NAME}, in {snapshot}: it lacks {shard}. Run `hf download {NAME}`" in said


@pytest.mark.parametrize("remove", [unlink_link, unlink_blob])
@pytest.mark.parametrize(
    "name, lacks", [("config.json", "config.json"), ("model.safetensors.index.json", "model.safetensors")]
)
def test_missing_files_are_named(remove, name, lacks, saved, cache):
    remove(put_into_cache(cache, saved[0]), name)
    with pytest.raises(CheckpointError, match=rf"it lacks {lacks}\. Run `hf download {NAME}`"):
        local_path(NAME)


def test_small_files_that_the_cache_knows_of_are_missed(saved, cache):
    """A model pruned without its tokenizer would be one without a tokenizer."""
    if not hasattr(pytest.importorskip("huggingface_hub.errors"), "IncompleteSnapshotError"):
        pytest.skip("this version of huggingface_hub does not note which files a repository has")
    snapshot = put_into_cache(cache, saved[0])
    trees = cache / f"models--{NAME.replace('/', '--')}" / "trees"
    trees.mkdir()
    known = [*os.listdir(snapshot), "README.md", "original/params.json", "consolidated.safetensors"]
    for more, missing in (([], None), (["tokenizer.json"], "tokenizer.json")):
        sha = f"{len(more):039x}b"
        snapshot = snapshot.rename(snapshot.with_name(sha))
        (snapshot.parent.parent / "refs" / "main").write_text(sha)
        content = {name: {"size": 1, "blob_id": "1"} for name in (*known, *more)}
        (trees / f"{sha}.json").write_text(json.dumps({"format_version": 1, "files": content}))
        if missing is None:
            assert local_path(NAME) == snapshot
        else:
            with pytest.raises(
                CheckpointError, match=rf"\({missing}\).* Run `hf download {NAME}`.* give that folder"
            ):
                local_path(NAME)


def test_folders_of_the_name_win(saved, cache):
    put_into_cache(cache, saved[0])
    shutil.copytree(saved[0], NAME)
    assert local_path(NAME) == Path(NAME)
    shutil.rmtree(NAME)
    assert local_path(NAME).name == SHA  # also beside other folders of this owner
    assert local_path(Path(NAME)) == Path(NAME)


@pytest.mark.parametrize(
    "path",
    [
        *("model", "./runs/model", "/runs/model", "runs/a/model", "runs/model/", "../runs/model", "~/model"),
        *("runs/model.gguf", "runs/model.safetensors", "here/models", "a--b/model", "runs/.hidden"),
    ],
)
def test_paths_that_do_not_exist_stay_paths(path, cache, capsys):
    Path("here").mkdir()
    save_adapter(Path("adapter"))
    assert local_path(path) == Path(path)
    for door in ("stream", "inspect", "import_model"):
        said = message_of(doors(path)[door], capsys)
        assert "does not exist" in said or "is no folder" in said
        assert "hub" not in said
        assert "hf download" not in said


def test_import_model_takes_revision_and_cache_dir(saved, cache, tmp_path):
    snapshot = put_into_cache(tmp_path / "elsewhere", saved[0])
    assert local_path(NAME, cache_dir=tmp_path / "elsewhere") == snapshot
    model = fmoe_ext.import_model(NAME, cache_dir=tmp_path / "elsewhere", revision=SHA)
    torch.testing.assert_close(model(input_ids=IDS).logits, saved[1], rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match=f"run `hf download {NAME} --revision v2`"):
        fmoe_ext.import_model(NAME, cache_dir=tmp_path / "elsewhere", revision="v2")
    with pytest.raises(CheckpointError, match="downloads nothing: leave force_download out"):
        fmoe_ext.import_model(NAME, force_download=True)


def test_gguf_files_in_the_cache_are_given_as_files(cache, tmp_path):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    snapshot = put_into_cache(cache, tmp_path / "repository")
    with pytest.raises(CheckpointError, match=f"give one of them, as {snapshot}/model-Q4_K_M.gguf"):
        local_path(NAME)


def test_names_without_huggingface_hub(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=f"pip install huggingface_hub, and run `hf download {NAME}`"
    ) as caught:
        local_path(NAME)
    assert f"{NAME} does not exist" in str(caught.value)
    assert local_path("word") == Path("word")
