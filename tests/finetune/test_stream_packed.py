"""Streams of experts in packed formats."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fmoe_ext import frozen
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.finetune.adapters import cli
from tests import published_packings
from tests.finetune.streamed_models import (
    WIDE,
    bytes_of_adapters,
    checkpoint_layers,
    decoded,
    of_values,
    pack,
    pack_linear,
    resident,
    save,
    streamed,
    with_adapters,
    write_gguf,
)
from tests.huggingface.huggingface_models import make_ids, step
from tests.packed_layouts import CONFIGS

SIZES = {"intermediate_size": 32, "moe_intermediate_size": 32}
MODELS = {
    "Qwen3Moe": ("Qwen3MoeForCausalLM", SIZES),
    "GptOss": ("GptOssForCausalLM", {"intermediate_size": 32, "swiglu_limit": 7.0}),
    "GptOss, other limit": ("GptOssForCausalLM", {"intermediate_size": 32}),
}


def error(found, expected):
    """Relative error in the norm."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_mxfp4_equals_the_decoded_model(tmp_path, name):
    architecture, changes = MODELS[name]
    folder = pack(save(tmp_path, architecture, torch.bfloat16, **changes))
    plain = with_adapters(decoded(folder)).train()
    ours = streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)
    ours = with_adapters(ours).train()
    checkpoint_layers(ours)
    expected, found = step(plain, make_ids()), step(ours, make_ids())
    assert error(found[0], expected[0]) < 1e-5
    assert found[2].keys() == expected[2].keys()
    for parameter, gradient in found[2].items():
        assert error(gradient, expected[2][parameter]) < 1e-4, parameter
    statistics = ours.expert_stream.statistics
    assert statistics.bytes_read == statistics.layers_read * 6 * (2 * 32 * 32 + 32 * 32) * 17 // 32
    ours.eval(), plain.eval()
    with torch.no_grad():
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(
            ours.generate(make_ids(1, 3), **options), plain.generate(make_ids(1, 3), **options)
        )
    assert ours.expert_stream.statistics.hits > 0


def test_weights_stay_packed_where_an_activation_runs_between_the_products(tmp_path, monkeypatch):
    """Decoded, DeepSeek-V4's layers took several times the memory that the stream was given."""
    architecture, changes = MODELS["GptOss, other limit"]
    folder = pack(save(tmp_path, architecture, torch.bfloat16, **changes))
    plain = with_adapters(decoded(folder)).train()
    ours = with_adapters(streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)).train()
    expected = step(plain, make_ids())

    def refuse(*_):
        raise AssertionError("decoded whole")

    monkeypatch.setattr(frozen.Quantized, "dequantize", refuse)
    found = step(ours, make_ids())
    assert error(found[0], expected[0]) < 1e-5
    for parameter, gradient in found[2].items():
        assert error(gradient, expected[2][parameter]) < 1e-4, parameter


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_merge_into_bfloat16(tmp_path, name, capsys):
    architecture, changes = MODELS[name]
    folder = pack(save(tmp_path / "model", architecture, torch.bfloat16, **changes))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = with_adapters(streamed(folder, 5, 10**6, dtype=torch.float32))
    model.save_pretrained(tmp_path / "adapter")
    arguments = [str(tmp_path / "adapter"), "--base", str(folder), "-o", str(tmp_path / "merged")]
    cli.main(["merge", *arguments, "--packing", "rank_major"])
    assert "rounding took a share" in capsys.readouterr().out
    report = json.loads((tmp_path / "merged/merge_report.json").read_text())
    assert report["decoded_from"] == "mxfp4" and report["dtype"] == "bfloat16"
    assert 0 < report["lost_share_median"] < 0.1
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    merged = resident(tmp_path / "merged").float()
    with torch.no_grad():
        expected, base = model(make_ids()).logits, decoded(folder)(make_ids()).logits
        assert error(merged(make_ids()).logits, expected) < 0.02 < 0.2 < error(base, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_merge_of_a_published_folder_into_bfloat16(tmp_path, name):
    folder = save(tmp_path / "model", dtype=torch.bfloat16, num_hidden_layers=3, **WIDE)
    values = pack_linear(folder, name)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = with_adapters(streamed(folder, 3, 10**8, dtype=torch.float32))
    model.save_pretrained(tmp_path / "adapter")
    arguments = [str(tmp_path / "adapter"), "--base", str(folder), "-o", str(tmp_path / "merged")]
    cli.main(["merge", *arguments, "--packing", "rank_major"])
    report = json.loads((tmp_path / "merged/merge_report.json").read_text())
    assert report["decoded_from"] == CONFIGS[name]["quant_method"]
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    merged = load_file(tmp_path / "merged/model.safetensors")
    query = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(merged[query], values[query].bfloat16()) and merged.keys() == values.keys()
    wrappers = [m for m in model.modules() if getattr(m, "parameter_name", "") == "down_proj"]
    for layer, wrapper in enumerate(wrappers):
        delta = wrapper.get_delta_weight("default")
        for e in range(6):
            expert = f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight"
            expected = values[expert] + delta[e].detach()
            assert error(merged[expert], expected) < 0.003 < 0.03 < error(values[expert], expected)
    assert len(wrappers) == 3


def test_packed_base_of_another_format_is_not_merged(tmp_path):
    folder = save(tmp_path / "model", dtype=torch.bfloat16)
    with_adapters(streamed(folder, 5, 10**6)).save_pretrained(tmp_path / "adapter")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [str(tmp_path / "adapter"), "--base", str(folder), "-o", str(tmp_path / "merged")]
    with pytest.raises(SystemExit, match="packed by hqq"):
        cli.main(["merge", *arguments, "--packing", "rank_major"])
    assert not (tmp_path / "merged").exists()


def assert_same_training(plain, ours):
    """The same loss, gradients and text, to rounding."""
    checkpoint_layers(ours)
    expected, found = step(plain.train(), make_ids()), step(ours.train(), make_ids())
    assert error(found[0], expected[0]) < 1e-4
    for parameter, gradient in found[2].items():
        assert error(gradient, expected[2][parameter]) < 1e-3, parameter
    options = {"max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        found, expected = (model.eval().generate(make_ids(1, 3), **options) for model in (ours, plain))
    assert torch.equal(found, expected)
    assert ours.expert_stream.statistics.hits > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_published_folder_equals_its_values(tmp_path, name):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=3, **WIDE)
    values = pack_linear(folder, name)
    plain = with_adapters(of_values(folder, values))
    ours = streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)
    assert_same_training(plain, with_adapters(ours))


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q4_0", "q5_k", "iq4_nl", "iq4_xs"])
def test_gguf_file_equals_its_values(tmp_path, kind):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=3, **WIDE)
    file, values = write_gguf(folder, kind)
    plain = with_adapters(of_values(folder, values))
    ours = streamed(file, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)
    assert_same_training(plain, with_adapters(ours))
    layers = ours.expert_stream.pool.layers
    packed_bytes = 3 * 256 * 256 * frozen.FORMATS[kind].bits / 8
    assert all(layer.num_bytes(1) == packed_bytes for layer in layers)  # as buffers hold them


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_gguf_file_in_int8_generates_and_trains_near_its_values(tmp_path, kind):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE)
    file, values = write_gguf(folder, kind, others=kind)
    plain = of_values(folder, values)
    ours = streamed(file, 2, dtype=torch.float32, int8_activations=True)
    with torch.no_grad():
        for ids in (make_ids(1, 1), make_ids()):
            assert 1e-5 < error(ours(ids).logits, plain(ids).logits) < 0.05
    assert (
        error(ours(make_ids()).logits, plain(make_ids()).logits) < 1e-5
    )  # exact where gradients are recorded


@pytest.mark.parametrize(
    "name", ["mxfp4-pack-quantized", "modelopt NVFP4", "nvfp4-pack-quantized", "DeepSeek-V4 FP4", "mxfp8"]
)
def test_folder_of_small_blocks_equals_its_values(tmp_path, name):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=3, **WIDE)
    values = pack_linear(folder, name, published_packings)
    plain = with_adapters(of_values(folder, values))
    ours = streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32)
    assert_same_training(plain, with_adapters(ours))


def test_truncated_gguf_file(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE)
    file, _ = write_gguf(folder, "q8_0")
    whole = file.read_bytes()
    for share in (0.0, 0.0001, 0.3, 0.99):
        file.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(CheckpointError):
            streamed(file)


def test_unknown_packed_weight_outside_of_experts(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is .*float8_e4m3fn, packed in a format"):
        streamed(folder)
