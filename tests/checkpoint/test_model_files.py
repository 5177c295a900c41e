"""open_model(): folders, GGUF files whole and split, and what is read of them how often; `fmoe info` of them."""

import json

import pytest
import torch

import fmoe_ext
from fmoe_ext import info
from fmoe_ext.checkpoint import CheckpointError, files, model_folder
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.doctor.subject import read as doctor_of
from fmoe_ext.model_files import open_config, open_model
from fmoe_ext.planning.sizes import sizes_of
from tests.finetune.streamed_models import WIDE, pack, save, split_gguf, write_gguf

pytest.importorskip("gguf", reason="pip install gguf")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), dtype=torch.float32, num_hidden_layers=2, **WIDE)


@pytest.fixture(scope="module")
def gguf_file(folder, tmp_path_factory):
    copy = save(tmp_path_factory.mktemp("gguf"), dtype=torch.float32, num_hidden_layers=2, **WIDE)
    return write_gguf(copy, "q4_k", "q8_0")[0]


def test_folder_has_the_experts_and_the_rest_of_its_model(folder):
    opened = open_model(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = opened.of(opened.skeleton())
    assert opened.config.num_experts == 6 and opened.num_tensors == len(opened.base.tensors)
    assert opened.dtype is torch.float32 and opened.packed_by == ""
    assert opened.formats == {"float32": 4 * sum(p.numel() for p in model.parameters())}
    assert list(weights.layers) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert weights.layers["model.layers.0.mlp.experts"].shapes == ((6, 512, 256), (6, 256, 256))
    others = weights.others(torch.float32)
    state = model.state_dict()
    assert others.keys() == {name for name in state if ".experts." not in name}
    for name, tensor in others.items():
        assert weights.parameter(name) == name and torch.equal(tensor.read(), state[name])


def test_gguf_file_and_its_parts_are_the_same_model(gguf_file, tmp_path):
    first = split_gguf(gguf_file, tmp_path / "parts", 3)[0]
    config = json.loads(gguf_file.with_name("config.json").read_text())
    (tmp_path / "parts" / "config.json").write_text(json.dumps(config | {"dtype": None}))
    whole, split = open_model(gguf_file), open_model(first)
    assert len(whole.weights) == 1 and len(split.weights) > 3
    assert whole.formats == split.formats and {"Q4_K", "Q8_0", "F32"} == whole.formats.keys()
    assert whole.dtype is torch.float32 and split.dtype is torch.bfloat16  # config.json names one
    of_whole, of_split = (opened.of(opened.skeleton()) for opened in (whole, split))
    others = of_split.others(torch.float32)
    assert sum(isinstance(tensor, PackedTensor) for tensor in others.values()) == 10  # 4 of attention, 2 ends
    for name, tensor in of_whole.others(torch.float32).items():
        assert torch.equal(tensor.read(), others[name].read())
    sizes = [sum(s.num_bytes for s in layer.every_span()) for layer in of_whole.layers.values()]
    assert sizes == [sum(s.num_bytes for s in layer.every_span()) for layer in of_split.layers.values()]
    assert sum(sizes) == whole.formats["Q4_K"]


def test_opened_files_are_not_opened_again(folder, monkeypatch):
    opened = open_model(folder)
    monkeypatch.setattr(model_folder.ModelFolder, "__init__", None)
    assert open_model(opened) is opened
    ids = torch.arange(3, 9)[None]
    monkeypatch.undo()
    expected = fmoe_ext.stream(folder, 2**30)(input_ids=ids).logits
    assert torch.equal(fmoe_ext.stream(opened, 2**30)(input_ids=ids).logits, expected)


def test_headers_and_index_are_read_once(tmp_path, monkeypatch):
    model = save(tmp_path / "one", num_hidden_layers=2)
    transformers.AutoModelForCausalLM.from_pretrained(model).save_pretrained(
        tmp_path / "two", max_shard_size="40KB"
    )
    read = []
    for module, name in ((model_folder, "read_json"), (model_folder, "read_unmapped")):
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path, before=before: read.append(path.name) or before(path))
    opened = open_model(tmp_path / "two")
    opened.of(opened.skeleton())
    assert len(opened.weights) > 2 and sorted(read) == sorted(
        [
            *(file.name for file in opened.weights),
            "config.json",
            "config.json",
            *2 * ["model.safetensors.index.json"],
        ]
    )


def test_configuration_alone_needs_no_weights(folder, gguf_file, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    for place in (tmp_path, tmp_path / "config.json", folder, gguf_file):
        assert open_config(place).hidden_size == 256
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors and no index of several"):
        open_model(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder and no GGUF file"):
        open_model(tmp_path / "config.json")


def test_doctor_and_plan_read_gguf_files(folder, gguf_file):
    assert type(doctor_of(str(gguf_file)).model).__name__ == "Qwen3MoeForCausalLM"
    assert sizes_of(str(gguf_file)) == sizes_of(str(folder))


def test_small_files_are_copied(folder, tmp_path):
    files.write_json(folder / "tokenizer.json", {"a": 1})
    (tmp_path / "out").mkdir()
    open_model(folder).copy_beside(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json"}
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_info_counts_a_model(folder, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    total = sum(p.numel() for p in model.parameters())
    info.main([str(folder), "--json", "--tflops", "2", "--length", "64", "--batch", "3", "--memory", "1GiB"])
    found = json.loads(capsys.readouterr().out)
    assert (found["architecture"], found["model_type"]) == ("Qwen3MoeForCausalLM", "qwen3_moe")
    assert (found["layers"], found["layers_with_experts"]) == (2, 2)
    assert (found["experts"], found["experts_per_token"]) == (6, 2)
    assert (found["parameters"], found["active_parameters"]) == (total, total - experts * 4 // 6)
    assert found["bytes_of_experts"] == 4 * experts and found["formats"] == {"float32": 4 * total}
    assert found["bytes"] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert found["tokens_of_a_step"] == 192 and found["fits"] == "whole"
    flops = sum(layer.flops for layer in sizes_of(str(folder))[0].layers(64))
    assert found["minutes_of_a_step"] == pytest.approx(3 * flops / 2e12 / 60)
    info.main([str(folder), "--tflops", "2"])
    text = capsys.readouterr().out
    assert f"{total:,}, {found['active_parameters']:,} active for a token" in text


def test_info_knows_what_stream_needs(folder):
    needed = info.of_model(folder, "1GiB", tflops=1)["memory_streamed"]
    ids = torch.arange(3, 9)[None]
    assert fmoe_ext.stream(folder, needed + 2**16)(input_ids=ids).logits.isfinite().all()
    with pytest.raises(ValueError, match="memory"):
        fmoe_ext.stream(folder, int(0.9 * needed))
    for memory, fits in ((2**30, "whole"), (needed, "streamed"), (needed - 1, "not")):
        assert info.of_model(folder, memory, tflops=1)["fits"] == fits


def test_info_names_packings(gguf_file, tmp_path, capsys):
    info.main([str(gguf_file), "--tflops", "1"])
    assert "Q4_K" in capsys.readouterr().out
    folder = pack(save(tmp_path, dtype=torch.bfloat16, intermediate_size=32, moe_intermediate_size=32))
    assert info.of_model(folder, tflops=1)["packed_by"] == "mxfp4"


def test_info_of_what_is_no_model(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*nothing is no folder and no GGUF file"):
        info.main([str(tmp_path / "nothing")])
