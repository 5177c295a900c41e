"""stream() of folders whose weights are in another dtype than the model, or in several."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext import huggingface
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.finetune.streaming import linear, reader
from fmoe_ext.testing import assert_close
from tests.finetune.streamed_models import (
    WIDE,
    bytes_of_adapters,
    of_values,
    pack_linear,
    save,
    streamed,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids

transformers = pytest.importorskip("transformers")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def in_memory(folder, dtype):
    return huggingface.use(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=make_ids()).logits


def change(folder, function):
    """Replaces the tensors of a folder by function(name, tensor)."""
    (file,) = folder.glob("*.safetensors")
    save_file({k: function(k, v) for k, v in load_file(file).items()}, file, {"format": "pt"})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_weights_are_cast_to_the_dtype_of_the_model(tmp_path, stored, dtype, monkeypatch):
    monkeypatch.setattr(reader, "RAW", 10000)  # several groups
    folder = save(tmp_path, dtype=stored, num_hidden_layers=3)
    expected = in_memory(folder, dtype)
    ours = streamed(folder, 2, dtype=dtype)
    assert torch.equal(logits(ours), logits(expected))


def test_layer_in_another_dtype_is_cast(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=3)
    change(folder, lambda name, t: t.float() if ".layers.1." in name else t)
    ours = streamed(folder, 2)
    assert torch.equal(logits(ours), logits(in_memory(folder, torch.bfloat16)))
    plain = with_adapters(in_memory(folder, torch.float32))
    ours = with_adapters(streamed(folder, 2, 4 * bytes_of_adapters(plain), dtype=torch.float32))
    found = gradients(ours)
    for name, expected in gradients(plain).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


def gradients(model):
    ids = make_ids()
    model.train()(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def test_expert_in_another_dtype_is_refused_by_name(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2)
    change(folder, lambda name, t: t.float() if ".layers.1.mlp.experts.3.gate" in name else t)
    with pytest.raises(
        CheckpointError, match=r"experts\.3\.gate_proj\.weight is torch\.float32 .*unlike the first"
    ):
        streamed(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_config_decides_where_files_have_another_dtype(tmp_path, dtype):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config | {"dtype": name}))
    ours = streamed(folder)
    assert ours.dtype == dtype
    assert torch.equal(logits(ours), logits(in_memory(folder, dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_beside_bfloat16_is_computed_in_every_dtype(tmp_path, dtype):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE)
    plain = load_file(next(folder.glob("*.safetensors")))
    values = pack_linear(folder, "fp8_block")
    (file,) = folder.glob("*.safetensors")
    is_plain = "model.layers.1.mlp.experts."
    tensors = {k: v for k, v in load_file(file).items() if not k.startswith(is_plain)}
    tensors |= {k: v for k, v in plain.items() if k.startswith(is_plain)}
    values |= {k: v.float() for k, v in plain.items() if k.startswith(is_plain)}
    save_file(tensors, file, {"format": "pt"})
    expected = logits(of_values(folder, values)).double()
    ours = logits(streamed(folder, dtype=dtype))
    assert ours.dtype == dtype
    error = (ours.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype.itemsize >= 4 else 0.1)


def test_fp8_without_quantization_config_is_refused_by_name(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2)
    change(folder, lambda name, t: t.to(torch.float8_e4m3fn) if ".experts." in name else t)
    with pytest.raises(
        CheckpointError, match=r"float8_e4m3fn, which needs scales, but .* no quantization_config"
    ):
        streamed(folder)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.float8_e4m3fn, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (torch.uint8, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ],
)
def test_packed_stack_of_experts_is_refused_by_name(dtype, config, tmp_path):
    """As libraries write the experts that Transformers has in one parameter: the error says what to do instead."""
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=1)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: t for name, t in load_file(file).items() if ".experts." not in name}
    for name, shape in (("gate_up_proj", (6, 48, 32)), ("down_proj", (6, 32, 24))):
        tensors[f"model.layers.0.mlp.experts.{name}"] = torch.zeros(shape).to(dtype)
        tensors[f"model.layers.0.mlp.experts.{name}_scale_inv"] = torch.ones(6, 1, 1)
    save_file(tensors, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj is a stack of packed experts"):
        streamed(folder)


def test_dtype_that_is_no_float_is_refused_by_name(tmp_path):
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"dtype must be one of torch.float64, .* but got torch.int8"):
        fmoe_ext.stream(folder, 2**40, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_ours_where_torch_is_slow_at_sixteen_bits(tmp_path, dtype, monkeypatch):
    folder = save(tmp_path, dtype=dtype, num_hidden_layers=2, attention_bias=True)
    truth = gradients(with_adapters(in_memory(folder, torch.float64)))
    plain = with_adapters(in_memory(folder, dtype))
    expected = gradients(plain)
    slow = {torch.bfloat16: "fast_bfloat16", torch.float16: "fast_float16"}[dtype]
    monkeypatch.setattr(
        linear, slow, lambda: False
    )  # the other stays fast, as float16 is slow on Zen 4 alone
    ours = with_adapters(streamed(folder, 2, 4 * bytes_of_adapters(plain)))
    of_torch, rows = torch.nn.functional.linear, set()

    def seen(x, weight, *rest):
        rows.add(weight.shape[0])
        return of_torch(x, weight, *rest)

    monkeypatch.setattr(torch.nn.functional, "linear", seen)
    found = gradients(ours)
    assert rows == {ours.config.num_experts}  # only the gates, which are no linear layers, are torch's
    for name, gradient in found.items():
        assert gradient.norm() > 0
        assert_close(gradient, truth[name], expected[name])


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe", "nemotron_h"])
def test_gguf_keeps_float32_where_the_model_of_16_bits_does(name, tmp_path):
    """Biases of a router near 7, which differ by less than bfloat16's step there, decide which experts are chosen."""
    pytest.importorskip("gguf", reason="pip install gguf")
    from tests.formats.test_formats import make
    from tests.formats.test_gguf import WRITTEN

    model_type, _, values = WRITTEN[name]
    model = make(model_type, **values).float()
    for path, tensor in model.state_dict().items():
        if "e_score_correction_bias" in path or "expert_bias" in path:
            tensor.add_(7)
    fmoe_ext.export(fmoe_ext.import_model(model), tmp_path / "model", "gguf")
    wide, ours = (
        fmoe_ext.stream(tmp_path / "model/model.gguf", 2**30, dtype=dtype).state_dict()
        for dtype in (torch.float32, torch.bfloat16)
    )
    kept = {path for path, tensor in ours.items() if tensor.dtype == torch.float32}
    assert any("bias" in path or "gate" in path for path in kept)
    for path in kept:
        assert torch.equal(ours[path], wide[path]), path
