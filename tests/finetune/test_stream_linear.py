"""Linear layers outside of the experts that a stream keeps packed."""

import copy
import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fmoe_ext import frozen
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.finetune.streaming.linear import PackedLinear
from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.gguf.reading import outside_experts
from tests.finetune.streamed_models import (
    WIDE,
    checkpoint_layers,
    of_values,
    pack_linear,
    save,
    streamed,
    write_gguf,
)
from tests.finetune.test_stream_packed import error
from tests.huggingface.huggingface_models import make_ids, step
from tests.packed_layouts import CONFIGS
from tests.sweeps import rest_is_long

peft = pytest.importorskip("peft")

GGUF = ("q8_0", "q4_k", "q6_k", "q4_0", "q5_k", "iq4_nl", "iq4_xs")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def folder_in(tmp_path, name, **changes):
    """A folder, or a GGUF file, whose linear layers are packed -> (its path, values)."""
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE | changes)
    if name in GGUF:
        return write_gguf(folder, "q8_0", name)
    return folder, pack_linear(folder, name)


def packed_layers(model):
    """{path: layer} of those that stay packed."""
    return {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}


def with_lora(model, **options):
    """LoRA on the attention, the same for every model of one architecture."""
    config = {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION, "init_lora_weights": False} | options
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(**config))


def logits(model, tokens):
    with torch.no_grad():
        return model(make_ids(1, tokens)).logits


@pytest.mark.parametrize("name", [*CONFIGS, *GGUF])
def test_logits_equal_those_of_the_decoded_model(tmp_path, name):
    # all experts for each token: with near ties rounding alone would choose others
    path, values = folder_in(tmp_path, name, num_experts_per_tok=6)
    plain = of_values(tmp_path, values)
    ours, rounded = streamed(path, dtype=torch.float32), streamed(path, dtype=torch.bfloat16)
    layers = packed_layers(ours)
    assert len(layers) == 2 * len(ATTENTION) + (name in GGUF) and ("lm_head" in layers) == (name in GGUF)
    for layer_path, layer in layers.items():
        decoded = layer._packed.dequantize()[0]
        assert torch.equal(decoded, values[f"{layer_path}.weight"]), layer_path
        assert isinstance(layer, nn.Linear) and layer.weight.shape == decoded.shape
    truth, plain_rounded = copy.deepcopy(plain).double(), copy.deepcopy(plain).bfloat16()
    counts = (1, 3, 30)  # decoded in registers, in rows, in panels
    expected = {tokens: logits(truth, tokens) for tokens in counts}
    for found, reference in ((ours, plain), (rounded, plain_rounded)):
        # one token's error is that of few roundings, so that its own may be small by chance
        limit = 2 * max(error(logits(reference, tokens), expected[tokens]) for tokens in counts)
        for tokens in counts:
            assert error(logits(found, tokens), expected[tokens]) < limit, tokens


TRAINED = list(itertools.product(("fp8_block", "int4", "nf4 nested", "q4_k"), (False, True)))


@pytest.mark.parametrize(("name", "checkpointing"), rest_is_long(TRAINED, [TRAINED[i] for i in (0, 3, 4, 7)]))
def test_lora_on_packed_layers_trains_as_on_decoded_ones(tmp_path, name, checkpointing):
    path, values = folder_in(tmp_path, name)
    plain = with_lora(of_values(tmp_path, values)).train()
    ours = with_lora(streamed(path, 2, 10**6, dtype=torch.float32)).train()
    if checkpointing:
        checkpoint_layers(ours)
    expected, found = step(plain, make_ids()), step(ours, make_ids())
    assert error(found[0], expected[0]) < 1e-5 and found[2].keys() == expected[2].keys()
    assert len(found[2]) == 2 * 2 * len(ATTENTION)
    for parameter, gradient in found[2].items():
        assert error(gradient, expected[2][parameter]) < 1e-4, parameter
    ours.eval(), plain.eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        assert torch.equal(
            ours.generate(make_ids(1, 3), **options), plain.generate(make_ids(1, 3), **options)
        )


def test_trained_adapter_is_saved_and_loaded(tmp_path):
    path, _ = folder_in(tmp_path / "model", "int4")
    model = with_lora(streamed(path, 2, 10**6, dtype=torch.float32))
    expected = logits(model, 5)
    model.save_pretrained(tmp_path / "adapter")
    again = streamed(path, 2, 10**6, dtype=torch.float32)
    before = logits(again, 5)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert torch.equal(logits(again, 5), expected) and error(before, expected) > 0.01


def test_budget_counts_packed_bytes(tmp_path):
    path, values = folder_in(tmp_path, "q4_k")
    model = streamed(path, dtype=torch.bfloat16)
    stream, layers = model.expert_stream, packed_layers(model)
    linear = {f"{layer_path}.weight" for layer_path in layers}
    counted = sum(t.numel() * t.element_size() for t in stream.resident_tensors())
    packed = sum(values[name].numel() * 144 // 256 for name in linear)
    others = sum(
        v.numel() * 2 for name, v in values.items() if ".experts." not in name and name not in linear
    )
    rotary = sum(t.numel() * t.element_size() for n, t in model.named_buffers() if "inv_freq" in n)
    assert counted == packed + others + rotary
    assert sum(layer._packed.nbytes for layer in layers.values()) == packed


def test_copies_share_the_bytes(tmp_path):
    path, _ = folder_in(tmp_path, "int4")
    model = streamed(path, dtype=torch.float32)
    again = copy.deepcopy(model)
    for layer_path, layer in packed_layers(model).items():
        copied = again.get_submodule(layer_path)
        assert copied is not layer and isinstance(copied, PackedLinear)
        assert copied.packed.data_ptr() == layer.packed.data_ptr()
    assert torch.equal(logits(again, 3), logits(model, 3))


def test_values_of_packed_weights_are_refused(tmp_path):
    path, _ = folder_in(tmp_path, "q8_0")
    model = streamed(path, dtype=torch.float32)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight.dtype == torch.float32 and not layer.weight.requires_grad
    assert "q8_0" in repr(layer) and model.to("cpu") is model and model.float() is model
    state = model.state_dict()
    assert not any(name.endswith((".packed", ".scale", ".zero")) for name in state)
    lora = with_lora(streamed(path, 2, 10**6, dtype=torch.float32))
    for broken in (
        lambda: layer.weight + 1,
        lambda: layer.weight.clone(),
        lambda: layer.weight.requires_grad_(),
        lambda: layer.half(),
        lambda: layer.weight.to(torch.empty(1, device="meta")),
        lambda: layer.load_state_dict({"weight": torch.zeros(256, 256)}),
        lambda: torch.save(state, tmp_path / "state"),
        lambda: lora.merge_and_unload(),
        lambda: with_lora(model, use_dora=True),
    ):
        with pytest.raises(
            RuntimeError, match=r"this weight is packed as its file has it|experts stay in the files"
        ):
            broken()
    with pytest.raises(RuntimeError, match="no weights of experts to save"):
        model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("name", ["int4", "q8_0"])
def test_tied_head_is_decoded(tmp_path, name):
    path, values = folder_in(tmp_path, name, tie_word_embeddings=True)
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    ours = streamed(path, dtype=torch.float32)
    assert type(ours.lm_head) is nn.Linear and ours.lm_head.weight is ours.model.embed_tokens.weight
    assert error(logits(ours, 3), logits(of_values(tmp_path, values), 3)) < 1e-6


def test_blocks_that_cross_rows_are_decoded(tmp_path):
    """Rows of 96 columns in nf4 blocks of 64."""
    folder = save(tmp_path, dtype=torch.bfloat16, num_hidden_layers=2, **WIDE | {"head_dim": 24})
    values = pack_linear(folder, "nf4")
    with_rows = packed_layers(model := streamed(folder, dtype=torch.float32))
    output = model.model.layers[0].self_attn.o_proj  # [256, 96]
    assert type(output) is nn.Linear and len(with_rows) == 2 * 3
    assert torch.equal(output.weight, values["model.layers.0.self_attn.o_proj.weight"])
    assert error(logits(model, 3), logits(of_values(folder, values), 3)) < 1e-6


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_turned_pairs_of_gguf(tmp_path, kind):
    """llama.cpp's rows of q and k rotate neighbours: packed rows are put in Transformers' order."""
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, head_dim=64
    )
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    plain = {}
    for letter, heads in (("q", 4), ("k", 2), ("v", 2)):
        weight = torch.randn(heads * 64, 256, generator=torch.Generator().manual_seed(heads))
        plain[letter] = frozen.quantize(weight[None], kind).dequantize()[0]
        if letter != "v":
            weight = weight.view(heads, 2, 32, 256).transpose(1, 2).reshape(weight.shape)
        data = frozen.quantize(weight[None], kind).data[0].numpy()
        raw = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor(f"blk.0.attn_{letter}.weight", data, raw_dtype=raw)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    file = tmp_path / "model.gguf"
    shapes = {f"model.layers.0.self_attn.{letter}_proj.weight": w.shape for letter, w in plain.items()}
    found = outside_experts(open_gguf(file), config, shapes, torch.float32)
    for letter, expected in plain.items():
        tensor = found[f"model.layers.0.self_attn.{letter}_proj.weight"]
        assert isinstance(tensor, PackedTensor) and tensor.shape == expected.shape
        assert torch.equal(tensor.packed().dequantize()[0], expected)
        assert torch.equal(tensor.read(), expected)


def gguf_with(tmp_path, kind, scale=None):
    """(file of one linear layer with random blocks, its values as the gguf package decodes them)."""
    gguf = pytest.importorskip("gguf")
    writer, raw = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe"), gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[raw]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 255, (64, 128 // block * num_bytes), generator=generator).byte()
    if kind == "MXFP4":
        data[:, ::17] = torch.randint(100, 140, (64, 4), generator=generator)
    writer.add_tensor("blk.0.attn_q.weight", data.numpy(), raw_dtype=raw)
    if scale is not None:
        writer.add_tensor("blk.0.attn_q.scale", torch.tensor([scale]).numpy())
        writer.add_tensor("blk.0.attn_q.input_scale", torch.tensor([3.0]).numpy())
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf", torch.from_numpy(gguf.quants.dequantize(data.numpy(), raw)).float()


def outside(file):
    config = pytest.importorskip("transformers").Qwen3MoeConfig(num_attention_heads=1, num_key_value_heads=1)
    shapes = {"model.layers.0.self_attn.q_proj.weight": (64, 128)}
    return outside_experts(open_gguf(file), config, shapes, torch.float32)


@pytest.mark.parametrize(("kind", "scale"), [("MXFP4", None), ("NVFP4", None), ("NVFP4", 0.3)])
def test_four_bits_of_gguf_stay_packed_with_the_values_of_the_gguf_package(tmp_path, kind, scale):
    """Its blocks hold their scales and have another order of nibbles than the operators' formats."""
    file, expected = gguf_with(tmp_path, kind, scale)
    found = outside(file)
    assert [*found] == ["model.layers.0.self_attn.q_proj.weight"]
    tensor = found["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(tensor, PackedTensor) and tensor.packed().format == kind.lower()
    expected = expected if scale is None else expected * scale
    torch.testing.assert_close(tensor.read(), expected, rtol=0 if scale is None else 2e-7, atol=0)


def test_factor_of_a_type_that_has_none_is_refused(tmp_path):
    from fmoe_ext.checkpoint import CheckpointError

    file, _ = gguf_with(tmp_path, "MXFP4", 0.3)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.scale scales a weight in mxfp4"):
        outside(file)


def test_config_with_another_shape(tmp_path):
    from fmoe_ext.checkpoint import CheckpointError

    path, _ = folder_in(tmp_path, "int4")
    config = json.loads((path / "config.json").read_text())
    config["num_attention_heads"] = 8
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"does not fit its config\.json: .*o_proj\.weight is \[256, 256\] in the files, but \[256, 512\]",
    ):
        streamed(path)


def test_other_errors_of_the_loader_keep_their_text(tmp_path, monkeypatch):
    def no_memory(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    path, _ = folder_in(tmp_path, "int4")
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", no_memory)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator: can't allocate memory$"):
        streamed(path)


@pytest.mark.parametrize("target", [["lm_head"], ["q_proj", "lm_head"], r".*\.q_proj|lm_head"])
def test_adapter_of_a_packed_head_is_saved(tmp_path, target):
    """PEFT saves a head whose adapter is trained, but a packed one has no values that it could write."""
    path, _ = folder_in(tmp_path, "q8_0")
    ours = with_lora(streamed(path, dtype=torch.float32), target_modules=target)
    assert isinstance(ours.get_base_model().lm_head.base_layer, PackedLinear)
    expected = logits(ours, 8)
    ours.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert all(".lora_" in key for key in saved) and any("lm_head.lora_A" in key for key in saved)
    again = peft.PeftModel.from_pretrained(streamed(path, dtype=torch.float32), tmp_path / "adapter")
    assert torch.equal(logits(again, 8), expected)
