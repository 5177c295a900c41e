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
    """[(what is wrong, file of torch.save())] that would need much more memory than it has bytes."""
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
    appended = folder / "appended.pt"  # its directory is that of a zip, its first bytes are the old format's
    shutil.copy(old, appended)
    with zipfile.ZipFile(appended, "a") as file:
        file.writestr("x", "")
    capitals = folder / "capitals.pt"  # torch finds names whatever their case
    with zipfile.ZipFile(zeros) as content, zipfile.ZipFile(capitals, "w") as file:
        for entry in content.infolist():
            file.writestr(entry.filename.replace("data.pkl", "DATA.PKL"), content.read(entry))
    return [
        ("is compressed", compressed),
        ("together larger", shared),
        *(("makes a bytearray", file) for file in (zeros, old, appended, capitals)),
    ]


def test_torch_files_are_bounded_by_their_size(tmp_path):
    """A zip of 9.4 MB took 4.1 GB."""
    for said, file in torch_files(tmp_path):
        with pytest.raises(CheckpointError, match=f"{file.name}.*{said}"):
            load_file(file, trust=False)
        with pytest.raises(SystemExit, match=said):
            main(["inspect", str(file)])
    good = tmp_path / "good.pt"
    for new in (True, False):
        torch.save({"model": {"bytearray": torch.ones(3)}}, good, _use_new_zipfile_serialization=new)
        if not new:
            with zipfile.ZipFile(good, "a") as content:
                content.writestr("x", "")
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


@pytest.mark.parametrize(
    "name, count, pattern, text",
    [
        ("a." * 1000 + "experts.0.w1", 1, ".*.*z", "not evaluated on names of 2026 characters"),
        ("layers.0.experts.0.w1", 1, ".*.*.*.*.*.*.*z", "not evaluated on names of 35 characters"),
        (
            "a." * 40 + "experts.{}.w1",
            1000,
            ".*.*z",
            "the 100 patterns of rank_pattern may take very long for 1000",
        ),
    ],
)
def test_patterns_that_take_very_long_are_refused(tmp_path, name, count, pattern, text):
    """ ".*.*.*.*z" took 3 s on one name of 192 characters, and 25 times that on one twice as long."""
    tensors = {f"{name.format(e)}.lora_A.weight": torch.zeros(1, 1) for e in range(count)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    patterns = {f"{pattern}{i}": 1 for i in range(1 if count == 1 else 100)}
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": patterns}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=text):
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
    from fmoe_ext.planning.sizes import sizes_of

    sizes_of(str(path))


def by_adapter_check(path):
    from fmoe_ext.checkpoint.model_folder import ModelFolder
    from fmoe_ext.finetune.adapters.check import logits

    logits(ModelFolder(path), path)


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


WRONG = (None, True, 0, -1, 7, 1.5, 10**30, "", "x", [], [[]], {}, {"x": 1}, [{"x": []}])
MISSING = object()  # the key is not there


def parts_of(value, at=()):
    """Every place in a JSON value, as the keys that lead to it."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from parts_of(part, (*at, key))


def hostile_records(record):
    """(place, value, record with it): at each place each of WRONG, nothing, a key more, and sizes too large."""

    def changed(at, value):
        copy = {"record": json.loads(json.dumps(record))}
        *parents, last = ("record", *at)
        part = copy
        for key in parents:
            part = part[key]
        if value is MISSING:
            del part[last]
        else:
            part[last] = value
        return copy.get("record")

    for at in parts_of(record):
        value = record
        for key in at:
            value = value[key]
        for wrong in WRONG:
            if type(wrong) is not type(value) or wrong != value:
                yield at, wrong, changed(at, wrong)
        if at:
            yield at, MISSING, changed(at, MISSING)
        if isinstance(value, dict):
            yield (*at, "unknown"), 1, changed((*at, "unknown"), 1)
    deep = []
    for _ in range(400):  # json.loads() takes it, functions that call themselves do not
        deep = [deep]
    layer = ("layers", 0)
    for at in [layer, (*layer, "options", "overlap_degree"), (*layer, "gate", "options", "noise")]:
        yield at, "deep lists", changed(at, deep)
    for name in ("num_experts", "d_hidden", "d_model", "top_k"):
        yield (*layer, name), 10**12, changed((*layer, name), 10**12)
    options = {"world_size": 2, "moe_group": "x", "num_expert": 3, "latent_size": 10**12, "device": "cuda:7"}
    options |= {
        "shared_expert_hidden": 10**12,
        "overlap_degree": -1,
        "gate_hook": "x",
        "mask": 3,
        "exchange": [],
    }
    for name, value in options.items():
        yield (*layer, "options", name), value, changed((*layer, "options", name), value)
    for name in ("top_k", "num_expert", "d_model", "no_such_option"):
        yield (*layer, "gate", "options", name), 10**12, changed((*layer, "gate", "options", name), 10**12)
    yield ("layers",), "twice", changed(("layers",), record["layers"] * 2)
    yield ("dense", "a.b.c"), "x", changed(("dense", "a.b.c"), "x")
    yield ("dense", "vocab_size"), "x", changed(("dense", "vocab_size"), "x")


def with_record(folder, path, record):
    values = json.loads((folder / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"fmoe_ext": record}))


def same_weights(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_hostile_record_of_fmoefy_ends_in_one_error(fmoefied, tmp_path):
    """A number as list of layers was a TypeError, a missing key a KeyError, a billion experts a full memory."""
    from fmoe_ext.huggingface import from_pretrained

    path = tmp_path / "model"
    shutil.copytree(fmoefied, path)
    record = json.loads((fmoefied / "config.json").read_text())["fmoe_ext"]
    whole = from_pretrained(fmoefied)
    taken = set()
    for at, value, hostile in hostile_records(record):
        with_record(fmoefied, path, hostile)
        try:
            model = from_pretrained(path)
        except (CheckpointError, ValueError) as error:
            kind = "is not of a fmoefied model" if hostile is None else "fmoe_ext"
            assert f"{path / 'config.json'}" in str(error) and kind in str(error), (at, value, error)
            is_of_sizes = "the tensors of " in str(error) and "fmoe_ext.layers" in str(error)
            named = all(str(key) in str(error) for key in at if key != "unknown")
            assert hostile is None or is_of_sizes or named, (at, value, error)
            assert "Take the folder as model.save_pretrained() wrote it" in str(error) or hostile is None
            continue
        assert same_weights(model, whole), (at, value)
        taken.add(at[-1])
    # words for people, what follows from the dense model, and defaults
    assert taken <= {"kind", "matched", "activation", "options", "gate_bias"}, taken


@pytest.mark.parametrize(
    ("change", "of_layer", "text"),
    [
        ({"vocab_size": 6_000_000}, {}, r"makes a LlamaForCausalLM of 192,\d+,\d+ weights, but .* bytes"),
        # the experts replace that MLP, so the model fits the files in the end
        (
            {"intermediate_size": 6_000_000},
            {},
            r"makes a LlamaForCausalLM of 576,\d+,\d+ weights, but .* bytes",
        ),
        (
            {},
            {"num_experts": 10**7, "options": {"shared_expert_hidden": -(10**10)}},
            r"layers\[0\] has num_experts 1",
        ),
        ({}, {"num_experts": 10**7, "options": {"latent_size": -(10**9)}}, "weights or more"),
        ({}, {"num_experts": 3000, "d_hidden": 1, "options": {"latent_size": 1}}, "weights or more"),
    ],
)
def test_sizes_are_compared_with_the_files_before_memory_is_taken(
    fmoefied, tmp_path, monkeypatch, change, of_layer, text
):
    """The dense model was not bounded, and a negative size outweighed the experts'."""
    import transformers

    from fmoe_ext.huggingface import from_pretrained, saved

    def make(*_):
        raise AssertionError("an MoE layer was made")

    monkeypatch.setattr(saved, "_rebuild", make)
    init = transformers.LlamaForCausalLM.__init__

    def on_meta_only(self, *args):
        assert torch.empty(0).is_meta, "memory was taken"
        init(self, *args)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", on_meta_only)
    path = tmp_path / "model"
    shutil.copytree(fmoefied, path)
    values = json.loads((path / "config.json").read_text())
    values["fmoe_ext"]["layers"][0] |= of_layer
    (path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointError, match=text):
        from_pretrained(path)


def test_computed_buffers_are_bounded(tmp_path):
    """A table of positions may be larger than the files of a small model, but not of any size."""
    from transformers import GPTJConfig, GPTJForCausalLM

    from fmoe_ext.huggingface import from_pretrained

    sizes = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_inner": 8, "rotary_dim": 8}
    config = GPTJConfig(**sizes, n_positions=20_000, bos_token_id=1, eos_token_id=2)
    model = fmoefy(GPTJForCausalLM(config), num_experts=2, top_k=1)
    model.save_pretrained(tmp_path)
    assert same_weights(from_pretrained(tmp_path), model)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_positions": 10_000_000}))
    with pytest.raises(CheckpointError, match=r"GPTJForCausalLM of 80,000,\d+ numbers in buffers"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("read", [r for r in READERS if r is not by_from_pretrained])
def test_fmoefied_folder_is_refused_by_readers_of_dense_models(folder, tmp_path, read):
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    for record in [value for value in WRONG if value is not None]:
        with_record(folder, path, record)
        with pytest.raises(READERS[read], match=r"has a fmoefied model, .* only fmoe_ext.huggingface"):
            read(path)


def test_hostile_record_in_memory_is_refused(folder, fmoefied):
    """Transformers gives a configuration any key of its file, so that fmoefy() and export() meet it too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from fmoe_ext.formats import export
    from fmoe_ext.huggingface import from_pretrained

    record = json.loads((fmoefied / "config.json").read_text())["fmoe_ext"]
    model = from_pretrained(fmoefied)
    config = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    for at, _, hostile in hostile_records(record):
        if hostile is None or at[:1] != ("version",):
            continue
        model.config.fmoe_ext = hostile
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.config: fmoe_ext.version"):
            export(model, folder.parent / "never", format="mixtral")
        dense = LlamaForCausalLM(LlamaConfig(**config, num_attention_heads=2, fmoe_ext=hostile))
        with pytest.raises(CheckpointError, match=r"LlamaForCausalLM.config: fmoe_ext.version"):
            fmoefy(dense, num_experts=2)
    assert not (folder.parent / "never").exists()


def test_trainer_that_resumes_reads_no_record(fmoefied, tmp_path):
    """It has the model, and takes weights alone."""
    pytest.importorskip("accelerate", reason="pip install accelerate")
    from transformers import Trainer, TrainingArguments

    from fmoe_ext.huggingface import from_pretrained

    path = tmp_path / "checkpoint-1"
    shutil.copytree(fmoefied, path)
    model, whole = from_pretrained(fmoefied), from_pretrained(fmoefied)
    args = {"report_to": [], "use_cpu": True, "max_steps": 1, "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "out"), **args))
    for record in WRONG:
        with_record(fmoefied, path, record)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        trainer._load_from_checkpoint(str(path))
        assert same_weights(model, whole)
