"""Folders that are damaged, lie or reach outside of themselves: stream() says so in one error, and changes no file."""

import json
import os
import random
import re
import struct
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.huggingface import register
from tests.finetune.streamed_models import pack, resident, save, streamed
from tests.huggingface.huggingface_models import make_ids

BIG = 2**30


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model", dtype=torch.float32)


def edit(path, change):
    """Changes the JSON of a file by change(values)."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("error", [CheckpointError, KeyboardInterrupt])
def test_read_that_failed_leaves_no_expert_in_the_slot_of_another(tmp_path, error, monkeypatch):
    """Half a layer fits, three experts of six; a token reads two at most. Every third read fails once."""
    folder = save(tmp_path / "model", dtype=torch.float32, num_hidden_layers=2)
    model, whole = streamed(folder, 1), resident(folder)
    reader = model.expert_stream.pool._reader
    read, count = reader.read, 0

    def failing(spans, into):
        nonlocal count
        count += 1
        read(spans, into)
        if count % 3 == 0:
            raise error("once")
        return 0

    monkeypatch.setattr(reader, "read", failing)
    failed = 0
    for i in range(3, 61):
        ids = torch.tensor([[i]])
        with torch.no_grad():
            try:
                found = model(ids).logits
            except error:
                failed += 1
                continue
            torch.testing.assert_close(found, whole(ids).logits)
    assert failed > 5 and model.expert_stream.statistics.hits > 5


def header_of(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_header(path, header, rest):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + rest)


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.01, 0.5, 0.999])
def test_truncated_file(folder, share):
    file = folder / "model.safetensors"
    data = file.read_bytes()[: int(share * file.stat().st_size)]
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="truncated, or damaged"):
        fmoe_ext.stream(folder, BIG)
    assert file.read_bytes() == data


@pytest.mark.parametrize("seed", range(60))
def test_header_with_random_bytes(folder, seed):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    draw = random.Random(seed)
    for _ in range(draw.choice([1, 2, 8])):
        data[draw.randrange(8 + size)] = draw.randrange(256)
    file.write_bytes(data)
    try:
        model = fmoe_ext.stream(folder, BIG)
    except (CheckpointError, ValueError) as error:
        assert len(str(error)) < 5000
    else:  # a name in the metadata, or a space
        assert model(make_ids()).logits.shape == (2, 12, 61)
    assert file.read_bytes() == bytes(data)


LIES = {
    "shape of an expert": lambda t: t.update(shape=t["shape"][::-1]),
    "dtype of an expert": lambda t: t.update(dtype="F16", shape=[t["shape"][0], t["shape"][1] * 2]),
    "offset behind the end": lambda t: t.update(data_offsets=[t["data_offsets"][0] + 10**9] * 2),
    "negative offset": lambda t: t.update(data_offsets=[-8, 8]),
    "huge shape": lambda t: t.update(shape=[2**62, 2**62]),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_header(folder, lie):
    file = folder / "model.safetensors"
    header, rest = header_of(file)
    LIES[lie](header["model.layers.1.mlp.experts.3.down_proj.weight"])
    write_header(file, header, rest)
    with pytest.raises(CheckpointError, match=r"damaged|expected|unlike"):
        fmoe_ext.stream(folder, BIG)


def test_file_truncated_after_it_was_opened(folder):
    model = streamed(folder, 1)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size // 3)
    with torch.no_grad(), pytest.raises(CheckpointError, match=r"ends .* bytes too early|was changed"):
        model(make_ids())


@pytest.mark.parametrize("when", ["before a read", "between reads"])
def test_file_changed_while_it_is_streamed(folder, when):
    model = streamed(folder, 1)
    file = folder / "model.safetensors"
    if when == "between reads":
        with torch.no_grad():
            model(make_ids())
    with file.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        changed.write(b"?")
    with (
        torch.no_grad(),
        pytest.raises(CheckpointError, match=r"safetensors was changed while it is streamed"),
    ):
        model(make_ids())


def test_file_replaced_while_it_is_streamed(folder, tmp_path):
    """The open file is read on, as a download that renames its result replaces it."""
    model = streamed(folder, 1)
    file = folder / "model.safetensors"
    with torch.no_grad():
        expected = fmoe_ext.stream(folder, BIG)(make_ids()).logits
        save_file(
            {name: value * 2 for name, value in load_file(file).items()}, tmp_path / "new", {"format": "pt"}
        )
        os.replace(tmp_path / "new", file)
        assert torch.equal(model(make_ids()).logits, expected)
        assert not torch.equal(fmoe_ext.stream(folder, BIG)(make_ids()).logits, expected)


CONFIGS = {
    "other hidden_size": {"hidden_size": 64},
    "other num_experts": {"num_experts": 5, "num_local_experts": 5},
    "more num_experts": {"num_experts": 7, "num_local_experts": 7},
    "other width": {"moe_intermediate_size": 25},
    "more layers": {"num_hidden_layers": 6},
    "other vocabulary": {"vocab_size": 60},
}


@pytest.mark.parametrize("change", CONFIGS)
def test_config_that_does_not_fit(folder, change):
    edit(folder / "config.json", lambda values: values.update(CONFIGS[change]))
    with pytest.raises(CheckpointError):
        fmoe_ext.stream(folder, BIG)


def test_more_layers_than_tensors_are_refused_before_a_model_is_made(folder, monkeypatch):
    """2,000 layers over two took 10 s."""
    edit(folder / "config.json", lambda values: values.update(num_hidden_layers=2000))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", None)
    with pytest.raises(
        CheckpointError, match=r"config\.json has 2000 layers, but there are only \d+ tensors"
    ):
        fmoe_ext.stream(folder, BIG)


REFUSED_BY_TRANSFORMERS = {
    "text for a number": {"hidden_size": "32"},
    "no heads": {"num_attention_heads": 0},
    "list for a type": {"model_type": ["qwen3_moe"]},
    "no object": {"quantization_config": [1, 2]},
    "unknown type": {"model_type": "qwen33_moe"},
    "dtype": {"dtype": {"a": 1}},
}


@pytest.mark.parametrize("change", REFUSED_BY_TRANSFORMERS)
def test_config_that_transformers_refuses(folder, change):
    edit(folder / "config.json", lambda values: values.update(REFUSED_BY_TRANSFORMERS[change]))
    with pytest.raises(CheckpointError, match=r"model has a config\.json that Transformers refuses: \w+: "):
        fmoe_ext.stream(folder, BIG)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"3"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_garbage(folder, name, text):
    (folder / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"model( |/)"):
        fmoe_ext.stream(folder, BIG)


ANYTHING = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**64, 1e300, "", "F32", [], [1], [-1, 5], [5, 1], [0, 2**62], [[1]], {}]
)


@given(st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_header_with_any_facts(folder, data):
    """Every change of an entry is refused in one error, or leaves the values as they are."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header, rest = header_of(file)
    names = sorted(name for name in header if name != "__metadata__")
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "all", "other entry"]))
        if key == "other entry":
            other = data.draw(st.sampled_from(names))
            header[name], header[other] = header[other], header[name]
        elif key == "all":
            header[name] = data.draw(ANYTHING)
        elif isinstance(header[name], dict):
            header[name][key] = data.draw(ANYTHING)
    write_header(file, header, rest)
    try:
        model = fmoe_ext.stream(folder, BIG)
        with torch.no_grad():
            assert model(make_ids()).logits.isfinite().all()
    except CheckpointError as error:
        assert str(folder) in str(error) and len(str(error)) < 5000
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", ["mlp.experts.3.down_proj", "self_attn.q_proj"])
def test_weight_that_is_missing(folder, name):
    file = folder / "model.safetensors"
    header, rest = header_of(file)
    header["left.over"] = header.pop(f"model.layers.1.{name}.weight")
    write_header(file, header, rest)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        fmoe_ext.stream(folder, BIG)


def test_gap_in_the_numbers_of_experts_is_named(tmp_path):
    """Names with a digit behind the expert's number; a stray expert 6 makes up for the missing 3."""
    folder = save(tmp_path, "MixtralForCausalLM")
    file = folder / "model.safetensors"
    header, rest = header_of(file)
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    header[name.format(6)] = header.pop(name.format(3))
    write_header(file, header, rest)
    with pytest.raises(CheckpointError, match=re.escape(f"lacks {name.format(3)}")):
        fmoe_ext.stream(folder, BIG)


def test_missing_scales_and_unknown_formats(tmp_path):
    folder = pack(save(tmp_path / "m", dtype=torch.bfloat16, intermediate_size=32, moe_intermediate_size=32))
    file = folder / "model.safetensors"
    whole, rest = header_of(file)
    name = "model.layers.1.mlp.experts.gate_up_proj_scales"
    header = dict(whole)
    header["left.over"] = header.pop(name)
    write_header(file, header, rest)
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        fmoe_ext.stream(folder, BIG)
    header = {key.replace("_blocks", "_qweight"): value for key, value in whole.items()}
    write_header(file, header, rest)
    with pytest.raises(
        CheckpointError, match=r"no tensors for model\.layers\.0\.mlp\.experts\.gate_up_proj: .*_qweight"
    ):
        fmoe_ext.stream(folder, BIG)


def test_index_that_leaves_the_folder(folder, tmp_path):
    file = folder / "model.safetensors"
    outside = tmp_path / "outside.safetensors"
    file.rename(outside)
    header, _ = header_of(outside)
    for name in ("../outside.safetensors", str(outside)):
        index = {"weight_map": {key: name for key in header if key != "__metadata__"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="no name of a file in this folder"):
            fmoe_ext.stream(folder, BIG)
    index = {"weight_map": {"model.norm.weight": "absent.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"absent\.safetensors does not exist"):
        fmoe_ext.stream(folder, BIG)
    (folder / "model.safetensors.index.json").unlink()
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside the folder"):
        fmoe_ext.stream(folder, BIG)


def test_pickles_and_empty_folders(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        fmoe_ext.stream(folder, BIG)
    with pytest.raises(CheckpointError, match="no folder"):
        fmoe_ext.stream(tmp_path / "absent", BIG)


@pytest.mark.parametrize("method", ["hqq", "auto-round"])
def test_format_that_is_not_read_is_named(folder, method):
    file = folder / "model.safetensors"
    header, rest = header_of(file)
    packed = {name.replace("_proj.weight", "_proj.qweight"): facts for name, facts in header.items()}
    write_header(file, packed, rest)
    edit(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": method, "bits": 4}))
    with pytest.raises(CheckpointError, match=rf"packed by {method}, which is not computed here"):
        fmoe_ext.stream(folder, BIG)


@pytest.mark.parametrize("memory", ["lots", "8 GB of it", -5, "-1GiB", True, None])
def test_memory_that_is_no_size(folder, memory):
    with pytest.raises(ValueError, match="memory must be bytes or a text like"):
        fmoe_ext.stream(folder, memory)


def test_memory_as_a_float(folder):
    assert fmoe_ext.stream(folder, 2.0**30).expert_stream.memory == 2**30


def test_missing_transformers(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"fmoe_ext\.stream\(\) needs .*: pip install 'transformers>=5\.7'"):
        fmoe_ext.stream(folder, BIG)
    with pytest.raises(
        ImportError, match=r"import_model\(\) needs transformers .*: pip install 'transformers'"
    ):
        fmoe_ext.import_model(folder)


def test_transformers_that_is_too_old(folder, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.6.1")
    with pytest.raises(ImportError, match=r"fmoe_ext\.stream\(\) needs Transformers 5\.7 .* this is 5\.6\.1"):
        fmoe_ext.stream(folder, BIG)
    with pytest.raises(ImportError, match=r'experts_implementation="fmoe" needs Transformers 5\.7'):
        register()


def test_missing_peft(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ImportError, match=r"lora\.fuse\(\) needs peft .*: pip install 'peft', .*'\.\[finetune\]'"
    ):
        fmoe_ext.lora.fuse(torch.nn.Linear(2, 2))
