"""Files that claim more than they are: refused by name before so much is made. Of GGUF: test_gguf_file.py."""

import contextlib
import io
import json
import os
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from fmoe_ext import FMoETransformerMLP, checkpoint, fmoefy
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.cli import main
from fmoe_ext.checkpoint.fastmoe import load_file
from fmoe_ext.finetune.adapters.reading import read_adapter

MiB = 2**20


class Zeros:
    """Pickled, it is bytearray(2^34)."""

    def __reduce__(self):
        return bytearray, (2**34,)


def torch_files(folder):
    """{kind: file of torch.save()} that would need much more memory than it has bytes."""
    plain = io.BytesIO()
    torch.save({"model": {"x": torch.zeros(MiB)}}, plain)
    with zipfile.ZipFile(plain) as content:
        entries = {entry.filename: content.read(entry) for entry in content.infolist()}
    compressed = folder / "compressed.pt"
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    shared = folder / "shared.pt"
    with zipfile.ZipFile(shared, "w") as file:
        for name, data in entries.items():
            file.writestr(name, data)
        largest = max(file.filelist, key=lambda entry: entry.file_size)
        for _ in range(50):
            file.filelist.append(largest)
    zeros = folder / "zeros.pt"
    torch.save({"model": Zeros()}, zeros)
    old = folder / "old.pt"
    torch.save({"model": Zeros()}, old, _use_new_zipfile_serialization=False)
    return {
        "is compressed": compressed,
        "together larger": shared,
        "a bytearray": zeros,
        "makes a bytearray": old,
    }


def test_torch_files_are_bounded_by_their_size(tmp_path):
    """A zip of 9.4 MB took 4.1 GB."""
    for said, file in torch_files(tmp_path).items():
        with pytest.raises(CheckpointError, match=f"{file.name}.*{said}"):
            load_file(file, trust=False)
        with pytest.raises(SystemExit, match=said):
            main(["inspect", str(file)])
    good = tmp_path / "good.pt"
    for new in (True, False):
        torch.save({"model": {"bytearray": torch.ones(3)}}, good, _use_new_zipfile_serialization=new)
        assert torch.equal(load_file(good, trust=False)["model"]["bytearray"], torch.ones(3))


def of_file(path):
    model = FMoETransformerMLP(2, 3, 4)
    checkpoint.load(path, model)


PIPES = {  # name of a pipe: what reads a folder with it
    "model.safetensors": of_file,
    "model.safetensors.index.json": of_file,
    "manifest.json": of_file,
    "latest": of_file,
    ".metadata": lambda path: main(["inspect", str(path)]),
    "latest_checkpointed_iteration.txt": lambda path: main(["inspect", str(path)]),
    "model.pt": lambda path: main(["inspect", str(path / "model.pt")]),
    "file.safetensors": lambda path: main(["inspect", str(path / "file.safetensors")]),
    "adapter_config.json": read_adapter,
    "adapter_model.safetensors": read_adapter,
}


@pytest.mark.parametrize("name", PIPES)
def test_pipes_are_refused(tmp_path, name):
    """Opening one waits for a writer, which never comes."""
    if name.startswith("adapter_model"):
        (tmp_path / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1})
        )
    if name == "adapter_config.json":
        save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    os.mkfifo(tmp_path / name)
    with pytest.raises((CheckpointError, SystemExit), match=r"no regular file|no checkpoint in"):
        PIPES[name](tmp_path)


def test_many_patterns_of_ranks_are_refused(tmp_path):
    """200,000 took more than 90 s."""
    save_file(
        {f"layers.{i}.lora_A.weight": torch.zeros(1, 1) for i in range(100)},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    patterns = {f"x{i}": 1 for i in range(200_000)}
    for name in ("rank_pattern", "alpha_pattern"):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {name: patterns}))
        with pytest.raises(CheckpointError, match=f"{name} has 200000 patterns for 100 tensors"):
            read_adapter(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hostile") / "model"
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def fmoefied(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("fmoefied") / "model"
    fmoefy(transformers.LlamaForCausalLM(config), num_experts=2, top_k=1).save_pretrained(path)
    return path


def by_stream(path):
    from fmoe_ext.finetune.streaming import stream

    stream(path, "1GiB")


def by_import(path):
    from fmoe_ext.formats import import_model

    import_model(path)


def by_doctor(path):
    from fmoe_ext.doctor.subject import read

    read(str(path))


def by_plan(path):
    from fmoe_ext.pipeline.sizes import sizes_of

    sizes_of(str(path))


def by_adapter_check(path):
    from fmoe_ext.checkpoint.model_folder import ModelFolder
    from fmoe_ext.finetune.adapters.check import logits

    logits(None, ModelFolder(path), path)


def by_from_pretrained(path):
    from fmoe_ext.huggingface import from_pretrained

    from_pretrained(path)


HOSTILE = {
    "num_hidden_layers": [10**6, 10**15, 1e300, "x", -1, [2]],
    "model_type": [["qwen3_moe"], {}, 7, "no such model"],
    "hidden_size": ["x", -16, [16]],
    "num_attention_heads": [0, "x", -2],
    "num_experts": [-4, "x"],
    "layer_types": [7, ["x"] * 2, {}],
    "rope_parameters": [7, "x", {"rope_type": "x"}],
    "vocab_size": ["x", -1],
    "hidden_act": [7, "x", ["silu"]],
    "dtype": ["x", {"a": 1}],
}


READERS = {  # and the errors that they have for a user
    by_stream: CheckpointError,
    by_import: CheckpointError,
    by_doctor: AuditError,
    by_plan: ValueError,
    by_adapter_check: CheckpointError,
    by_from_pretrained: CheckpointError,
}


@pytest.mark.parametrize("read", READERS)
def test_hostile_configurations_end_in_one_error(folder, fmoefied, tmp_path, read):
    """A million layers took more than 90 s in import_model(), and Transformers raises what it happens to meet.

    A value that Transformers does not look at is none of ours; it must not be another error than ours.
    """
    folder = fmoefied if read is by_from_pretrained else folder
    error = READERS[read]
    read(folder)
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    values = json.loads((folder / "config.json").read_text())
    refused = set()
    for key, hostile in HOSTILE.items():
        for value in hostile:
            (path / "config.json").write_text(json.dumps(values | {key: value}))
            with contextlib.suppress(error):
                read(path)
                continue
            refused.add((key, str(value)))
    # the planner takes a type that Transformers lacks by its numbers
    always = ["num_hidden_layers"] if read is by_plan else ["num_hidden_layers", "model_type"]
    assert {(key, str(value)) for key in always for value in HOSTILE[key]} <= refused
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    for text in (nested, "[]", "7", "{", "\x00"):
        (path / "config.json").write_text(text)
        with pytest.raises(error):
            read(path)
    os.remove(path / "config.json")
    os.mkfifo(path / "config.json")
    with pytest.raises(error, match="no regular file"):
        read(path)
