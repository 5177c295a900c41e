"""export() where the machine fails it, on several ranks, as GGUF, and how much memory it takes."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext import fmoefy
from fmoe_ext.checkpoint import CheckpointError
from tests.forked import run_python
from tests.formats.test_formats import (
    HEADS,
    assert_equal_logits,
    llama,
    load,
    logits,
    make,
    moe_layers,
)

transformers = pytest.importorskip("transformers")


def wide_llama():
    return fmoefy(make("llama", hidden_size=128, intermediate_size=512, num_key_value_heads=4), 8)


def test_gguf_is_checked_before_training():
    """As any other format: by the family that export() would take it to, and by what llama.cpp computes."""
    pytest.importorskip("gguf", reason="pip install gguf")
    fmoe_ext.formats.check_export(wide_llama(), "gguf")
    biased = fmoefy(make("llama", hidden_size=32, num_key_value_heads=4, attention_bias=True), 4)
    with pytest.raises(CheckpointError) as refused:
        fmoe_ext.formats.check_export(biased, "gguf")
    with pytest.raises(CheckpointError) as exported:
        fmoe_ext.export(biased, "never_made", "gguf")
    assert str(exported.value).endswith(str(refused.value)) and not Path("never_made").exists()


@pytest.mark.parametrize("format", ["mixtral", "gguf"])
def test_no_room(format, tmp_path):
    """A limit on the size of files, as on a full disk: one error with the bytes needed, nothing left behind."""
    if format == "gguf":
        pytest.importorskip("gguf", reason="pip install gguf")
    model = wide_llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no space left on the device.* bytes needed"):
            fmoe_ext.export(model, tmp_path / "out", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


KILLED = """
import os, signal, sys
from fmoe_ext.formats import writing
from tests.formats.test_formats import llama
import fmoe_ext

write = writing.write_model_files
def write_and_die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
writing.write_model_files = write_and_die
fmoe_ext.export(llama(), sys.argv[1], "mixtral")
"""


def test_killed(tmp_path):
    """Nothing is at the place of a killed export; the next one removes what it left and writes."""
    root = Path(__file__).parent.parent.parent
    done = run_python(KILLED, tmp_path / "out", env={**os.environ, "PYTHONPATH": str(root)}, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "out").exists() and len(list(tmp_path.glob(".out.*.tmp"))) == 1
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    assert [f.name for f in tmp_path.iterdir() if not f.name.endswith(".lock")] == ["out"]
    assert_equal_logits(load(tmp_path / "out"), logits(llama()))


def test_files_that_lie(tmp_path):
    """Damaged folders are refused at import, in our words; the model on disk stays."""
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    file = tmp_path / "out" / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:1000], content[:-8], b"\xff" * 8 + content[8:]):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="no safetensors file, or truncated, or damaged"):
            fmoe_ext.import_model(tmp_path / "out")
        assert file.read_bytes() == damaged
        with pytest.raises(CheckpointError, match="is no safetensors file, or truncated, or damaged"):
            fmoe_ext.checkpoint.load(tmp_path / "out", llama())
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256"):
        fmoe_ext.checkpoint.load(tmp_path / "out", llama())


@pytest.mark.parametrize("lost", ["layers.1", "lm_head"])
def test_part_of_a_model_is_refused(lost, tmp_path):
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    file = tmp_path / "out" / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if lost not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"out lacks \S*{lost}.* Transformers would draw at random"):
        fmoe_ext.import_model(tmp_path / "out")


def point_index_to(name):
    def forge(folder, secret):
        file = str(secret) if name is None else name
        (folder / "model.safetensors").unlink()
        weights = dict.fromkeys(load_file(secret), file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))

    return forge


def link_weights(folder, secret):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(secret)


def link_config(folder, secret):
    (folder / "config.json").rename(folder.parent / "config")
    (folder / "config.json").symlink_to(folder.parent / "config")


def name_weights(folder, secret):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"transformers_weights": "../secret.safetensors"})
    )


def name_base_model(folder, secret):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(secret.parent / "base")}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


FORGED = {
    "relative": (point_index_to("../secret.safetensors"), "is no name of a file in this folder"),
    "absolute": (point_index_to(None), "is no name of a file in this folder"),
    "weights": (link_weights, "is a link to .*secret.safetensors, outside the folder"),
    "config": (link_config, "is a link to .*config, outside the folder"),
    "named in the config": (name_weights, "is no name of a file in this folder"),
    "adapter": (name_base_model, "has adapter_config.json, which names another model"),
}


@pytest.mark.parametrize("name", FORGED)
def test_import_refuses_what_lies_outside_the_folder(name, tmp_path):
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes((tmp_path / "out" / "model.safetensors").read_bytes())
    forge, text = FORGED[name]
    forge(tmp_path / "out", secret)
    with pytest.raises(CheckpointError, match=text):
        fmoe_ext.import_model(tmp_path / "out")


def test_import_reads_a_folder_of_the_hubs_cache(tmp_path):
    """Its files are links into blobs, which lie beside the snapshots."""
    fmoe_ext.export(llama(), tmp_path / "out", "mixtral")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "out").iterdir():
        file.rename(blobs / file.stem)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.stem}")
    assert_equal_logits(fmoe_ext.import_model(snapshot, dtype=torch.float64), logits(llama()))


MEMORY = """
import sys
import fmoe_ext
from fmoe_ext import fmoefy
from tests.formats.test_formats import make

def kilobytes(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

model = fmoefy(make("llama", hidden_size=256, intermediate_size=2048), 8).float()
fmoe_ext.export(fmoefy(make("llama"), 2), sys.argv[1] + "/small", "mixtral")  # what is imported at the first call
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak is the present size now
before = kilobytes("VmRSS:")
fmoe_ext.export(model, sys.argv[1] + "/out", "mixtral")
print(sum(p.nbytes for p in model.parameters()) // 1024, kilobytes("VmHWM:") - before)
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc"
)
def test_memory(tmp_path):
    """A tensor at a time: the peak grows by a small part of the model."""
    root = Path(__file__).parents[2]
    done = run_python(MEMORY, tmp_path, env={**os.environ, "PYTHONPATH": str(root)}, timeout=300)
    assert done.returncode == 0, done.stderr
    model, more = map(int, done.stdout.split()[-2:])
    assert model > 50_000 and more < model / 5, (model, more)
    print(f"{model} KiB of parameters, {more} KiB more at the peak")


def save_on_ranks(folder):
    """Experts over two ranks: this rank's part of what one process saves and exports."""
    model = fmoefy(make("qwen3", **HEADS), num_local_experts=2)
    with torch.no_grad():
        for layer in moe_layers(model):
            for value in layer.experts.parameters():
                value += layer.ep_rank
    model.save_pretrained(f"{folder}/saved")
    fmoe_ext.export(model, f"{folder}/exported", "qwen3_moe")
    try:
        fmoe_ext.export(model, f"{folder}/exported", "qwen3_moe")
    except CheckpointError as error:
        text = str(error)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    fmoe_ext.checkpoint.load(f"{folder}/saved", model)
    return text, [layer.experts.htoh4.weight.detach().clone() for layer in moe_layers(model)]


def test_experts_over_ranks(pool, tmp_path):
    """save_pretrained and export from all ranks, loaded in one process and again on the ranks."""
    from fmoe_ext.huggingface import from_pretrained

    results = pool.run(save_on_ranks, str(tmp_path), timeout=300.0)
    whole = from_pretrained(tmp_path / "saved", dtype=torch.float64)
    assert [layer.num_experts for layer in moe_layers(whole)] == [4, 4]
    for rank, (text, weights) in enumerate(results):
        assert "exists already: give a new folder" in text
        for layer, mine in zip(moe_layers(whole), weights, strict=True):
            assert torch.equal(mine, layer.experts.htoh4.weight[2 * rank : 2 * rank + 2])
    assert_equal_logits(load(tmp_path / "exported"), logits(whole))
    assert sorted(f.name for f in tmp_path.iterdir()) == ["exported", "saved"]
    with pytest.raises(ValueError, match=r"world_size: from_pretrained loads all experts into one process"):
        from_pretrained(tmp_path / "saved", world_size=2)
