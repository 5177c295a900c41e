"""Streams of experts in packed formats."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fmoe_ext import ops
from fmoe_ext.checkpoint.adapters import cli
from tests.integrations.huggingface_models import make_ids, step
from tests.integrations.streamed_models import (
    bytes_of_adapters,
    checkpoint_layers,
    decoded,
    pack,
    resident,
    save,
    streamed,
    with_adapters,
)

pytest.importorskip("transformers")
pytest.importorskip("peft")

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


def test_packed_base_of_another_format_is_not_merged(tmp_path):
    folder = save(tmp_path / "model", dtype=torch.bfloat16)
    with_adapters(streamed(folder, 5, 10**6)).save_pretrained(tmp_path / "adapter")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = [str(tmp_path / "adapter"), "--base", str(folder), "-o", str(tmp_path / "merged")]
    with pytest.raises(SystemExit, match=r"quantised \(awq\)"):
        cli.main(["merge", *arguments, "--packing", "rank_major"])
    assert not (tmp_path / "merged").exists()


def pack_projections(folder):
    """Every matrix of a folder as FP8 with scales, an expert and a projection each -> (folder, {name: decoded})."""
    (file,) = folder.glob("*.safetensors")
    tensors, decoded_tensors = {}, {}
    for name, value in load_file(file).items():
        if value.dim() != 2 or "embed" in name or "lm_head" in name or name.endswith("gate.weight"):
            tensors[name] = decoded_tensors[name] = value
            continue
        packed = ops.quantize(value.float()[None], "fp8_block")
        tensors |= {name: packed.data[0], f"{name}_scale_inv": packed.scale[0]}
        # Experts are decoded in the operators, in the dtype of their tokens.
        dtype = torch.float32 if ".experts." in name else torch.bfloat16
        decoded_tensors[name] = packed.dequantize(dtype)[0]
    config = json.loads((folder / "config.json").read_text())
    save_file(decoded_tensors, file, {"format": "pt"})
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    save_file(tensors, file, {"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, plain


def test_fp8_projections_equal_the_decoded_model(tmp_path):
    folder, plain = pack_projections(save(tmp_path, "Qwen3MoeForCausalLM", torch.bfloat16, **SIZES))
    ours = streamed(folder, 2, dtype=torch.float32)
    assert any("weight_scale_inv" in name for name in load_file(next(folder.glob("*.safetensors"))))
    with torch.no_grad():
        assert error(ours(make_ids()).logits, plain(make_ids()).logits) < 1e-5
