"""export() and import_model(): plain Transformers and our layers give equal logits, in float64 to 1e-12."""

import copy
import functools
import json
import re

import pytest
import torch
from safetensors.torch import load_file

import fmoe_ext
from fmoe_ext import FMoETransformerMLP, SigmoidGate, SoftmaxGate, fmoefy, huggingface
from fmoe_ext.checkpoint import CheckpointError
from tests.formats.format_models import (
    DENSE,
    HEADS,
    MODELS,
    SIZES,
    assert_equal_logits,
    load,
    logits,
    make,
    moe_layers,
    num_moe_layers,
    randomised,
    without_float32,
)
from tests.sweeps import rest_is_long

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, tmp_path):
    """A model of Transformers -> its folder -> ours -> a folder -> Transformers: the same logits, the same tensors."""
    make(name.split(",")[0], **MODELS[name]).float().save_pretrained(tmp_path / "theirs")
    expected = logits(load(tmp_path / "theirs"))
    ours = fmoe_ext.import_model(tmp_path / "theirs", dtype=torch.float64)
    assert len(moe_layers(ours)) == num_moe_layers(name)
    assert_equal_logits(ours, expected)
    ours.float()
    fmoe_ext.export(ours, tmp_path / "ours", name.split(",")[0])
    assert_equal_logits(load(tmp_path / "ours"), expected)
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    ids = torch.arange(3, 15).view(1, -1)
    theirs, ours = (m(input_ids=ids).logits for m in (load(tmp_path / "theirs").float(), ours))
    assert (theirs - ours).abs().max() <= 1e-6 * theirs.abs().max()
    model = fmoe_ext.import_model(tmp_path / "theirs")
    for p in model.parameters():
        p.data.zero_()
    fmoe_ext.checkpoint.load(tmp_path / "ours", model)
    assert_equal_logits(model.double(), expected)


@pytest.mark.parametrize("name", DENSE)
def test_fmoefied_models(name, tmp_path):
    """A dense model that fmoefy changed, its gates default where nothing is said, is a model of Transformers."""
    source, format, values, options = DENSE[name]
    model = randomised(fmoefy(make(source, **values), 4, **options))
    expected = logits(model)
    fmoe_ext.export(model, tmp_path / "out", format)
    again = load(tmp_path / "out")
    assert again.config.model_type == format
    assert_equal_logits(again, expected)
    assert_equal_logits(fmoe_ext.import_model(tmp_path / "out", dtype=torch.float64), expected)


def test_without_widening(tmp_path):
    """As everybody runs it, equal to what Transformers' gates round."""
    model = randomised(fmoefy(make("qwen3", **HEADS), 4))
    fmoe_ext.export(model, tmp_path / "out", "qwen3_moe")
    ids = torch.arange(3, 15).view(1, -1)
    expected, got = (m(input_ids=ids).logits for m in (model, load(tmp_path / "out")))
    assert 0 < (got - expected).abs().max() <= 1e-6 * expected.abs().max()


def llama(num_experts=4, **options):
    return randomised(fmoefy(make("llama"), num_experts, **options))


def with_gate(gate, **options):
    return lambda: llama(gate=functools.partial(gate, **options) if options else gate)


def changed(attribute, value):
    def make_it():
        model = llama()
        setattr(moe_layers(model)[0], attribute, value)
        return model

    return make_it


REFUSED = {
    "expert choice": (with_gate("expert_choice"), "mixtral", "ExpertChoiceGate, expected one of"),
    "switch": (with_gate("switch"), "mixtral", "SwitchGate, expected one of"),
    "noisy": (with_gate("noisy"), "mixtral", "NoisyGate, expected one of"),
    "sigmoid": (with_gate(SigmoidGate), "mixtral", "SigmoidGate, expected one of NaiveGate, SoftmaxGate"),
    "capacity": (
        with_gate(SoftmaxGate, capacity_factor=1.5),
        "mixtral",
        "capacity_factor=1.5, expected None",
    ),
    "scale": (with_gate(SoftmaxGate, scale=2.5), "mixtral", "scale=2.5, expected 1"),
    "groups": (with_gate(SoftmaxGate, num_groups=2), "mixtral", "num_groups=2, expected 1"),
    "normalize": (with_gate(SoftmaxGate, normalize=False), "mixtral", "normalize=False, expected True"),
    "gate bias": (lambda: llama(gate_bias=True), "mixtral", r"mlp\.gate\.gate\.bias is not zero"),
    "bias": (lambda: llama(bias=True), "mixtral", r"experts\.h\w+\.bias is not zero"),
    "shared": (lambda: llama(shared_expert_hidden=8), "mixtral", "has no such shared experts"),
    "not shared": (llama, "qwen2_moe", "no gated shared experts, which every layer of this format has"),
    "activation": (lambda: llama(activation=torch.tanh, bias=False), "mixtral", "tanh|no SwiGLU experts"),
    "mask": (changed("mask", torch.zeros(3)), "mixtral", "has mask="),
    "dense layers": (
        lambda: llama(layers=[1]),
        "mixtral",
        "every layer of mixtral is MoE, .* layers 0 are dense",
    ),
    "norms": (
        llama,
        "qwen3_moe",
        "qwen3_moe holds models of qwen3_moe, qwen3, but this one is llama: .* mixtral",
    ),
    "no format": (
        lambda: fmoefy(make("phi3", pad_token_id=0), 4),
        "mixtral",
        "but this one is phi3.*none of the",
    ),
    "attention bias": (
        lambda: randomised(fmoefy(make("llama", attention_bias=True), 4)),
        *("mixtral", r"self_attn\.\w+\.bias has no place"),
    ),
    "dense model": (lambda: make("llama"), "mixtral", "has no FMoETransformerMLP: fmoefy it"),
    "not of Transformers": (
        lambda: torch.nn.Sequential(FMoETransformerMLP(2, 4, 8)),
        *("mixtral", "Sequential is no model of Transformers"),
    ),
    "format": (llama, "gpt2", "format must be one of afmoe, .* gguf, or .* but got 'gpt2'"),
    "gpt_oss": (llama, "gpt_oss", "activation swiglu|are others"),
    "gguf activation": (
        lambda: randomised(fmoefy(make("llama", hidden_act="gelu"), 4)),
        *("gguf", "hidden_act=gelu has no place in GGUF's llama"),
    ),
    "gguf window": (
        lambda: randomised(fmoefy(make("mistral", sliding_window=5), 4)),
        *("gguf", "sliding_window=5 has no place"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_export_refuses_what_format_lacks(name, tmp_path):
    """Refused by name, before anything is written."""
    make_model, format, text = REFUSED[name]
    model = make_model()
    with pytest.raises(CheckpointError, match=text):
        fmoe_ext.export(model, tmp_path / "a" / "out", format)
    assert not list(tmp_path.iterdir())


def test_layers_that_differ(tmp_path):
    model = llama()
    moe_layers(model)[1].gate.top_k = 1
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp has top_k=2 and .*layers\.1\.mlp has top_k=1"):
        fmoe_ext.export(model, tmp_path / "out", "mixtral")


def test_export_refuses_folder_with_files(tmp_path):
    (tmp_path / "file").write_text("of somebody")
    with pytest.raises(CheckpointError, match="exists already: give a new folder"):
        fmoe_ext.export(llama(), tmp_path, "mixtral")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_tokenizer_and_shards(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    model = llama()
    fmoe_ext.export(model, tmp_path / "one", "mixtral", tokenizer=tokenizer, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    files = {key: name for key, name in index["weight_map"].items() if "layers.1." in key}
    assert len(set(index["weight_map"].values())) > 1 and len(set(files.values())) == 1
    fmoe_ext.export(model, tmp_path / "two", "mixtral", tokenizer=tmp_path / "one")
    for folder in ("one", "two"):
        assert_equal_logits(load(tmp_path / folder), logits(model))
        read = transformers.AutoTokenizer.from_pretrained(tmp_path / folder)
        assert read("b a c", return_token_type_ids=False).input_ids == [1, 0, 2]
    with pytest.raises(CheckpointError, match="has no files of a tokenizer"):
        fmoe_ext.export(model, tmp_path / "three", "mixtral", tokenizer=tmp_path)


def test_import_of_a_model_in_memory():
    """The parameters are the model's own memory; options and other models are refused."""
    model = make("qwen3_moe", **MODELS["qwen3_moe"])
    expected, w1 = logits(model), model.model.layers[1].mlp.experts.gate_up_proj
    ours = fmoe_ext.import_model(model)
    assert ours is model and moe_layers(ours)[0].experts.htoh4.weight.data_ptr() == w1.data_ptr()
    assert_equal_logits(ours, expected)
    assert_equal_logits(copy.deepcopy(ours), expected)
    with pytest.raises(TypeError, match="dtype: options are for a folder or a name"):
        fmoe_ext.import_model(model, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="has no MoE layer that is not ours already"):
        fmoe_ext.import_model(model)
    with pytest.raises(CheckpointError, match=r"llama is not imported.* knows afmoe, "):
        fmoe_ext.import_model(make("llama"))
    with pytest.raises(CheckpointError, match=r"router_jitter_noise=0\.1 .* set it to 0"):
        fmoe_ext.import_model(make("mixtral", router_jitter_noise=0.1))
    with pytest.warns(UserWarning, match=r"output_router_logits is off now: add 0\.001 \* fmoe_ext"):
        fmoe_ext.import_model(make("mixtral", output_router_logits=True))


@pytest.mark.parametrize("frozen", ["gate.", "experts.", "shared_expert."])
def test_frozen_tensors_stay_frozen(frozen):
    """And the rest of the layer trains."""
    model = make("qwen2_moe", **MODELS["qwen2_moe"])
    for name, parameter in model.model.layers[0].mlp.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    ours = {"shared_expert.": "shared_experts.mlp."}.get(frozen, frozen)
    parameters = dict(fmoe_ext.import_model(model).model.layers[0].mlp.named_parameters())
    assert len(parameters) == 6 and any(name.startswith(ours) for name in parameters)
    for name, parameter in parameters.items():
        assert parameter.requires_grad != name.startswith(ours), name


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_router_logits_are_refused_by_name(name):
    model = fmoe_ext.import_model(make(name, **MODELS[name]))
    ids = torch.ones(1, 3, dtype=torch.int64)
    for part in (model, model.base_model):
        with pytest.raises(ValueError, match=r"keep no router logits.*gates.total_loss\(model\)"):
            part(input_ids=ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="keep no router logits"):
        model(input_ids=ids)
    model(input_ids=ids, output_router_logits=False)


def test_gradients_of_an_imported_model():
    """Transformers' and ours, without the balance loss: the same."""
    ids = torch.arange(3, 27).view(2, -1)
    theirs = make("mixtral", **MODELS["mixtral"])
    ours = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]))
    with without_float32():
        for model in (theirs, ours):
            model(input_ids=ids, labels=ids).loss.backward()
    expected, got = (m.model.layers[0].mlp for m in (theirs, ours))
    for a, b in (
        (expected.experts.gate_up_proj, got.experts.htoh4.weight),
        (expected.experts.down_proj, got.experts.h4toh.weight),
        (expected.gate.weight, got.gate.gate.weight),
    ):
        assert (a.grad - b.grad).norm() <= 1e-12 * a.grad.norm()


def trainer(model, folder, steps):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    rows = torch.randint(3, SIZES["vocab_size"], (8, 10), generator=torch.Generator().manual_seed(1))
    return transformers.Trainer(model, arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])


def resumed(make_model, folder):
    """A model that was stopped after two steps and resumed in another one, whose weights are compared, bitwise."""
    whole, first, second = make_model(), make_model(), make_model()
    trainer(whole, folder / "whole", 4).train()
    trainer(first, folder / "parts", 4).train()
    with torch.no_grad():
        for p in second.parameters():
            p.zero_()
    trainer(second, folder / "parts", 4).train(resume_from_checkpoint=str(folder / "parts/checkpoint-2"))
    expected, got = whole.state_dict(), second.state_dict()
    assert expected.keys() == got.keys() and all(torch.equal(expected[k], got[k]) for k in expected)
    return second


@pytest.mark.parametrize(
    "kind", rest_is_long(["imported", "fmoefied", "used", "used gpt_oss"], ["imported", "used"])
)
def test_trainer_resumes(kind, tmp_path):
    """Interrupted after two steps and resumed by another process's model: the weights of four steps, bitwise."""
    pytest.importorskip("accelerate")

    def new():
        if kind == "fmoefied":
            return randomised(fmoefy(make("llama"), 4))
        name = kind.partition(" ")[2] or "mixtral"
        model = make(name, **MODELS[name])
        return fmoe_ext.import_model(model) if kind == "imported" else huggingface.use(model)

    second = resumed(new, tmp_path)
    if kind == "imported":
        assert_equal_logits(load(tmp_path / "parts/checkpoint-4"), logits(second))


def test_save_pretrained_over_an_older_save(tmp_path):
    model = fmoe_ext.import_model(make("mixtral", **MODELS["mixtral"]))
    model.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    model.save_pretrained(tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").glob("model*")] == ["model.safetensors"]
    assert_equal_logits(load(tmp_path / "out"), logits(model))
    with pytest.raises(CheckpointError, match="takes no push_to_hub"):
        model.save_pretrained(tmp_path / "out", push_to_hub=True)
    with pytest.raises(
        CheckpointError, match="max_shard_size must be bytes, or a text as '5GB', but got 'big'"
    ):
        model.save_pretrained(tmp_path / "out", max_shard_size="big")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="which is not the model's own"):
        model.save_pretrained(tmp_path / "out", state_dict=state)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]


def test_ways_out_are_known_before_training():
    """The report of fmoefy names the formats; check_export refuses as export would."""
    from fmoe_ext.formats import check_export

    assert "export() can write it as mixtral or qwen2_moe" in repr(llama().fmoe_report)
    check_export(llama(), "mixtral")
    for source in ("gemma", "phi3", "smollm3"):
        model = fmoefy(make(source), 4)
        text = f"no format of export\\(\\) holds {source} models .*: save_pretrained\\(\\) writes a folder"
        assert re.search(text, repr(model.fmoe_report))
        with pytest.raises(
            CheckpointError, match=f"For {source} there is none of the formats: its save_pretrained"
        ):
            check_export(model, "mixtral")


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_config_does_not_promise_layers_that_are_not_written(name, tmp_path):
    """Transformers leaves layers that predict further tokens in the files; others would look for them here."""
    model = make(name, **MODELS[name] | {"num_mtp_layers": 1})
    fmoe_ext.export(fmoe_ext.import_model(model), tmp_path / "out", name)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 0
    assert_equal_logits(load(tmp_path / "out"), logits(make(name, **MODELS[name])))
