"""config.json of what we save says what is in the files: every key, and those that the model itself decides."""

import json

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext import huggingface
from fmoe_ext.checkpoint import CheckpointError
from tests.formats.format_models import MODELS, make
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")
QUICK = ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe"]


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def original(folder, name="mixtral", dtype=torch.bfloat16, **changes):
    """The folder of a model of Transformers."""
    make(name.partition(",")[0], **MODELS[name] | changes).to(dtype).save_pretrained(folder)
    return folder


def state(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("name", rest_is_slow(MODELS, QUICK))
def test_import_and_save_change_no_key(name, tmp_path):
    """Of a model that nobody changed, with router logits where the family has them."""
    kind = name.partition(",")[0]
    has_logits = hasattr(transformers.AutoConfig.for_model(kind), "output_router_logits")
    source = original(tmp_path / "a", name, **({"output_router_logits": True} if has_logits else {}))
    model = fmoe_ext.import_model(source)
    fmoe_ext.export(model, tmp_path / "b", kind)
    model.save_pretrained(tmp_path / "c")
    expected = config_of(source)
    if expected.get("topk_method") == "greedy":  # which chooses without groups, and 1 group says so
        expected |= {"n_group": 1, "topk_group": 1}
    assert config_of(tmp_path / "b") == expected and config_of(tmp_path / "c") == expected
    assert expected.get("output_router_logits", True) is True


@pytest.mark.parametrize("name", rest_is_slow(MODELS, QUICK))
def test_dtype_is_that_of_the_files(name, tmp_path):
    """Imported in bfloat16, written in float32: Transformers and stream() read what was written."""
    source = original(tmp_path / "a", name)
    model = fmoe_ext.import_model(source).float()
    fmoe_ext.export(model, tmp_path / "b", name.partition(",")[0])
    assert config_of(tmp_path / "b")["dtype"] == "float32"
    expected, found = state(source), state(tmp_path / "b")
    assert all(
        value.dtype == torch.float32 and torch.equal(value, expected[k].float()) for k, value in found.items()
    )
    streamed = fmoe_ext.stream(tmp_path / "b", 2**40)
    assert streamed.dtype == torch.float32
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        torch.testing.assert_close(
            streamed(input_ids=ids).logits, loaded(input_ids=ids).logits, rtol=1e-4, atol=1e-4
        )


def test_made_or_fmoefied_model_says_its_dtype(tmp_path):
    """A configuration that was made by hand names no dtype."""
    config = transformers.AutoConfig.for_model(
        "llama",
        **{"vocab_size": 61, "hidden_size": 32},
        **{"intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4},
    )
    for dtype in (torch.float32, torch.bfloat16):
        model = fmoe_ext.fmoefy(transformers.LlamaForCausalLM(config).to(dtype), 4)
        folder = tmp_path / str(dtype)
        fmoe_ext.export(model, folder / "export", "mixtral")
        model.save_pretrained(folder / "saved")
        assert config_of(folder / "export")["dtype"] == str(dtype).removeprefix("torch.")
        assert fmoe_ext.stream(folder / "export", 2**40).dtype == dtype
        assert huggingface.from_pretrained(folder / "saved").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_stream_takes_the_dtype_of_files_whose_config_names_none(is_gguf, dtype, tmp_path):
    source = original(tmp_path / "a", dtype=dtype, sliding_window=None)
    if is_gguf:
        pytest.importorskip("gguf", reason="pip install gguf")
        fmoe_ext.export(fmoe_ext.import_model(source), tmp_path / "b", "gguf")
        file = tmp_path / "b/model.gguf"
    else:
        config = config_of(source)
        del config["dtype"]
        (source / "config.json").write_text(json.dumps(config))
        file = source
    assert fmoe_ext.stream(file, 2**40).dtype == dtype


def test_wider_gate_keeps_its_bits(tmp_path):
    """A fmoefied model of two dtypes comes back with both."""
    model = fmoe_ext.fmoefy(make("llama").bfloat16(), 4)
    for module in model.modules():
        if isinstance(module, fmoe_ext.gates.BaseGate):
            module.float()
    model.save_pretrained(tmp_path / "saved")
    found, expected = huggingface.from_pretrained(tmp_path / "saved").state_dict(), model.state_dict()
    assert {value.dtype for value in expected.values()} >= {torch.float32, torch.bfloat16}
    assert all(v.dtype == expected[k].dtype and torch.equal(v, expected[k]) for k, v in found.items())


def made(kind):
    """(model, how it is saved, how it is loaded) of an imported or a fmoefied one, in float32."""
    if kind == "imported":
        return fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]).float()), state
    model = fmoe_ext.fmoefy(make("llama").float(), 4)
    return model, lambda folder: huggingface.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("kind", ["imported", "fmoefied"])
def test_tie_and_vocabulary_are_those_of_the_model(kind, tmp_path):
    """Embeddings that were changed by hand leave the configuration as it was."""
    model, load = made(kind)
    with torch.no_grad():
        rows = torch.cat((model.model.embed_tokens.weight, torch.ones(3, 32)))
    model.model.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
    model.lm_head = nn.Linear(32, 64, bias=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "tied")
    found = config_of(tmp_path / "tied")
    assert found["vocab_size"] == 64 and found["tie_word_embeddings"] is True
    loaded = load(tmp_path / "tied")
    assert torch.equal(loaded["model.embed_tokens.weight"], rows) and torch.equal(
        loaded["lm_head.weight"], rows
    )

    model.lm_head.weight = nn.Parameter(rows * 2)
    model.save_pretrained(tmp_path / "apart")
    assert config_of(tmp_path / "apart")["tie_word_embeddings"] is False
    loaded = load(tmp_path / "apart")
    assert torch.equal(loaded["model.embed_tokens.weight"], rows) and torch.equal(
        loaded["lm_head.weight"], rows * 2
    )


def test_layers_that_config_does_not_count_are_refused(tmp_path):
    model, _ = made("imported")
    model.model.layers = model.model.layers[:1]
    with pytest.raises(CheckpointError, match="every layer of mixtral is MoE, but here layers 1"):
        model.save_pretrained(tmp_path / "out")
