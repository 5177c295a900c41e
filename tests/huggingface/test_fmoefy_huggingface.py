"""fmoefy on dense models of Transformers, small and random."""

import copy
import functools
import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    RobertaPreLayerNormConfig,
    T5Config,
    Trainer,
    TrainingArguments,
    ViTConfig,
)

from fmoe_ext import FMoETransformerMLP, fmoefy, gates
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.huggingface import from_pretrained
from fmoe_ext.testing import assert_close

VOCAB = 40
SIZES = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB
)
LLAMA = dict(SIZES, num_key_value_heads=2, head_dim=8)
NO_TOKENS = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
GPT2 = dict(
    vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
T5 = dict(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
BART = dict(
    vocab_size=VOCAB,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    max_position_embeddings=16,
    activation_dropout=0.1,
    forced_eos_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
VIT = dict(SIZES, image_size=8, patch_size=4)
OPT = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    word_embed_proj_dim=16,
    ffn_dim=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    **NO_TOKENS,
)

# name: (auto class, configuration, path of the first MoE layer, activation, number of MLPs, notes)
INSIDE = "its dropout between the linear layers is left out"
MODELS = {
    "gpt2": (AutoModelForCausalLM, GPT2Config(**GPT2), "transformer.h.0.mlp", "gelu_tanh", 2, ()),
    "llama": (AutoModelForCausalLM, LlamaConfig(**LLAMA), "model.layers.0.mlp", "swiglu", 2, ()),
    "qwen3": (AutoModelForCausalLM, Qwen3Config(**LLAMA), "model.layers.0.mlp", "swiglu", 2, ()),
    "gemma2": (AutoModelForCausalLM, Gemma2Config(**LLAMA), "model.layers.0.mlp", "geglu_tanh", 2, ()),
    "phi3": (AutoModelForCausalLM, Phi3Config(**SIZES, **NO_TOKENS), "model.layers.0.mlp", "swiglu", 2, ()),
    "opt": (AutoModelForCausalLM, OPTConfig(**OPT), "model.decoder.layers.0.fc1", "relu", 2, ()),
    "bert": (AutoModelForMaskedLM, BertConfig(**SIZES), "bert.encoder.layer.0.intermediate", "gelu", 2, ()),
    "vit": (AutoModelForImageClassification, ViTConfig(**VIT), "vit.layers.0.mlp", "gelu", 2, ()),
    "t5": (
        AutoModelForSeq2SeqLM,
        T5Config(**T5, feed_forward_proj="gated-gelu"),
        "encoder.block.0.layer.1.DenseReluDense",
        "geglu_tanh",
        2,
        (INSIDE,),
    ),
    "bart": (
        AutoModelForSeq2SeqLM,
        BartConfig(**BART),
        "model.encoder.layers.0.fc1",
        "gelu",
        2,
        ("its dropout (0.1) between the linear layers is left out",),
    ),
}


def make(name):
    auto, config = MODELS[name][:2]
    torch.manual_seed(0)
    model = auto.from_config(copy.deepcopy(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # weights so large that the MLPs matter to the logits
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator).mul_(0.3) + (p == 1))
    return model.eval()


def batch(model, dtype):
    generator = torch.Generator().manual_seed(2)
    if model.config.model_type == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator).to(dtype)}
    ids = torch.randint(3, VOCAB, (2, 7), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
    return {**inputs, "decoder_input_ids": ids} if model.config.is_encoder_decoder else inputs


def logits(model):
    """Of the real tokens: a fmoefied model gives padding no expert."""
    inputs = batch(model, model.dtype)
    mask = inputs.get("attention_mask")
    with torch.no_grad():
        out = model(**inputs).logits
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def zero_experts(model):
    for module in model.modules():
        if isinstance(module, FMoETransformerMLP):
            torch.nn.init.zeros_(module.experts.h4toh.weight)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_first_logits_are_those_of_the_dense_model(name):
    _, _, path, activation, num_mlps, notes = MODELS[name]
    plain = make(name)
    dense = copy.deepcopy(plain).double()
    truth = logits(dense)
    for split in (1, 2):
        options = dict(num_experts=4, init="upcycle", split=split)
        moe = fmoefy(copy.deepcopy(dense), **options)
        report = moe.fmoe_report
        assert (report.kind, len(report.replaced)) == ("Hugging Face Transformers", num_mlps)
        first = report.replaced[0]
        assert (first.path, first.activation, first.notes) == (path, activation, notes)
        assert (logits(moe) - truth).abs().max() <= 1e-12 * truth.abs().max()
        assert (logits(zero_experts(moe)) - truth).abs().max() > 0.01 * truth.abs().max()
        assert_close(logits(fmoefy(copy.deepcopy(plain), **options)), truth, logits(plain), f"split={split}")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_training_step_changes_gates_and_experts(name):
    moe = fmoefy(make(name), 4, init="upcycle", split=2).train()
    inputs = batch(moe, torch.float32)
    before = copy.deepcopy(moe.state_dict())
    loss = moe(**inputs, labels=inputs["input_ids"]).loss + 0.01 * gates.total_loss(moe)
    loss.backward()
    torch.optim.AdamW(moe.parameters(), lr=1e-3).step()
    moe_params = [n for n, _ in moe.named_parameters() if ".experts." in n or ".gate.gate." in n]
    assert len(moe_params) == 2 * (3 if name == "llama" else 5)
    for key in moe_params:
        p = moe.get_parameter(key)
        assert p.grad.isfinite().all() and (p.grad != 0).any(), key
        assert not torch.equal(p, before[key]), key


def test_dropout_behind_the_mlp_stays():
    moe = fmoefy(make("gpt2"), 4, init="upcycle")
    experts, dropout = moe.transformer.h[0].mlp
    assert isinstance(experts, FMoETransformerMLP) and dropout.p == moe.config.resid_pdrop == 0.1
    first, second = (logits(moe.train()) for _ in range(2))
    assert not torch.equal(first, second)


def test_generate():
    dense = make("llama").double()
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
    prompt = torch.tensor([[5, 6, 7]])
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    tokens = dense.generate(prompt, **options)
    assert tokens.shape == (1, 9) and torch.equal(moe.generate(prompt, **options), tokens)
    assert not torch.equal(zero_experts(moe).generate(prompt, **options), tokens)


FIRST_MLP = {name: path.removesuffix(".fc1") for name, (_, _, path, *_) in MODELS.items()}
NEEDS = r"needs fmoe_ext\.huggingface\.from_pretrained"


@pytest.mark.parametrize("name", MODELS)
def test_save_pretrained_round_trip(name, tmp_path):
    moe = fmoefy(make(name), 4, init="upcycle", noise=0.1, layers=-1)
    gate = functools.partial(gates.SigmoidGate, scale=1.5)
    sizes = dict(top_k=1, hidden_hidden_size=5, activation="relu", gate=gate, gate_bias=True)
    if name not in ("opt", "bart", "bert"):  # a second call; their MLPs are no modules
        fmoefy(moe, 2, match=FIRST_MLP[name], **sizes)
    moe.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = from_pretrained(tmp_path)
    assert type(again) is type(moe)
    state, expected = again.state_dict(), moe.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    assert torch.equal(logits(again), logits(moe.eval()))
    assert repr(again.fmoe_report.replaced[-1]) == repr(moe.fmoe_report.replaced[-1])
    again.save_pretrained(tmp_path / "again")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    assert configs[0] == configs[1]
    with pytest.raises(Exception, match=NEEDS):
        MODELS[name][0].from_pretrained(tmp_path)


def test_round_trip_keeps_dtype_generation_and_ties(tmp_path):
    moe = fmoefy(make("gpt2").bfloat16(), 4, init="upcycle", gate="sigmoid")
    moe.generation_config.max_new_tokens = 3
    moe.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16 and again.generation_config.max_new_tokens == 3
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(logits(again), logits(moe))
    assert from_pretrained(tmp_path, dtype=torch.float64).dtype == torch.float64
    assert from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype, None or 'auto', but is 'float32'"):
        from_pretrained(tmp_path, dtype="float32")


class OwnGate(gates.NaiveGate):
    total_weight = 1.0


def silent(*_):
    pass


def test_callables_missing_in_file_must_be_passed(tmp_path):
    square = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.1))
    moe = fmoefy(make("opt"), 4, gate=OwnGate, activation=square, gate_hook=silent).eval()
    moe.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"layers\.0\.fc1 cannot be built from the file alone: pass (.|\n)*OwnGate"
    ):
        from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"pass activation= \(it was Sequential"):
        from_pretrained(tmp_path, gate=OwnGate, gate_hook=silent)
    again = from_pretrained(tmp_path, gate=OwnGate, activation=square, gate_hook=silent)
    assert torch.equal(logits(again), logits(moe))
    assert type(again.model.decoder.layers[1].fc1.gate) is OwnGate


def test_callables_are_passed_to_the_layers_that_miss_them(tmp_path):
    moe = fmoefy(make("llama"), 4, gate="sigmoid", match=lambda path, _: path == "model.layers.1.mlp")
    moe = fmoefy(moe, 4, gate=OwnGate, match=lambda path, _: path == "model.layers.0.mlp").eval()
    moe.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, gate=OwnGate)
    assert [type(layer.mlp.gate) for layer in again.model.layers] == [OwnGate, gates.SigmoidGate]
    assert torch.equal(logits(again), logits(moe))


def test_from_pretrained_says_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        from_pretrained(tmp_path)
    dense = make("llama")
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not of a fmoefied model: load it with Transformers'"):
        from_pretrained(tmp_path)
    fmoefy(dense, 4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"version": 9}, r"fmoe_ext\.version is 9, but this fmoe_ext reads 1"),
        (
            {"layers": config["fmoe_ext"]["layers"][:1]},
            r"do not fit LlamaForCausalLM: missing \['model\.layers\.1",
        ),
    ):
        changed = config | {"fmoe_ext": config["fmoe_ext"] | change}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises((ValueError, CheckpointError), match=message):
            from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'\.\./model\.safetensors' is no name of a file"):
        from_pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    assert from_pretrained(tmp_path).config.fmoe_ext == config["fmoe_ext"]  # as Transformers: the single file
    weights.rename(tmp_path.parent / "elsewhere")
    with pytest.raises(ValueError, match=r"must hold 'missing\.safetensors'"):
        from_pretrained(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"must hold model\.safetensors"):
        from_pretrained(tmp_path)
    weights.symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere, outside the folder"):
        from_pretrained(tmp_path)


def test_from_pretrained_follows_no_link_out_of_the_folder(tmp_path):
    fmoefy(make("llama"), 4).save_pretrained(tmp_path / "moe")
    (tmp_path / "moe" / "generation_config.json").rename(tmp_path / "elsewhere")
    (tmp_path / "moe" / "generation_config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"is a link to .*elsewhere, outside the folder"):
        from_pretrained(tmp_path / "moe")


class Unmarkable(torch.nn.Module):
    """A model whose configuration names no activation."""

    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig(hidden_size=6)
        self.encoder = torch.nn.TransformerEncoderLayer(6, 2, 8)

    def save_pretrained(self, folder):
        raise AssertionError("it was saved")


def test_saving_without_a_record_is_refused():
    """A file that would be taken for the dense model's."""
    model = fmoefy(Unmarkable(), 4)
    with pytest.raises(RuntimeError, match="names no activation"):
        model.save_pretrained("nowhere")


def test_configuration_it_was_made_of_stays_as_it_was():
    config = make("llama").config
    before, model = config.to_dict(), type(make("llama"))(config)
    moe = fmoefy(model, 4)
    assert config.to_dict() == before
    assert "fmoe_ext" in moe.config.to_dict() and moe.model.config is moe.config
    assert isinstance(type(model)(config), type(model))  # as a dense one


def test_default_gates_can_be_exported():
    from fmoe_ext.checkpoint.huggingface import to_huggingface

    moe = fmoefy(make("llama"), 4)
    assert moe.model.layers[0].mlp.gate.gate.bias is None
    assert "model.layers.1.mlp.experts.gate_up_proj" in to_huggingface(moe.state_dict())
    biased = fmoefy(make("llama"), 4, gate_bias=True)
    with pytest.raises(CheckpointError, match=r"gate\.gate\.bias is not zero.*gate_bias=False"):
        to_huggingface(biased.state_dict())


def test_gated_activation_without_a_name_is_kept(tmp_path):
    """No fused kernel computes quick_gelu and ReLU^2: exact at first, exact after a save, replaced on request."""
    for hidden_act in ("quick_gelu", "relu2", "relu"):
        dense = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA, hidden_act=hidden_act)).double().eval()
        expected = logits(dense)
        moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
        assert (
            logits(moe) - expected
        ).abs().max() <= 1e-6 * expected.abs().max()  # float32 inside Transformers
        moe.save_pretrained(tmp_path / hidden_act)
        assert torch.equal(logits(from_pretrained(tmp_path / hidden_act)), logits(moe))
        with pytest.raises(
            ValueError, match=r"keeps the activation of model\.layers\.0\.mlp, GatedActivation\("
        ):
            fmoefy(copy.deepcopy(dense), 4, init="upcycle", activation="swiglu")
    fmoefy(dense, 4, activation="swiglu")
    assert {r.activation for r in dense.fmoe_report.replaced} == {"swiglu"}


def test_misspelt_argument_gets_a_hint():
    with pytest.raises(
        TypeError, match=r"^fmoefy takes no argument overlap_degre=: did you mean overlap_degree=\?"
    ):
        fmoefy(make("llama"), 4, overlap_degre=4)
    with pytest.raises(TypeError, match=r"no argument zzz=; other arguments are those of FMoETransformerMLP"):
        fmoefy(make("llama"), 4, zzz=4)


def test_deepcopy_and_compile():
    moe = fmoefy(make("llama"), 4, init="upcycle").double()
    inputs = batch(moe, torch.float64)
    expected = moe(**inputs, labels=inputs["input_ids"])
    expected.loss.backward()
    other = copy.deepcopy(moe)
    other.zero_grad()
    compiled = torch.compile(other, backend="eager")(**inputs, labels=inputs["input_ids"])
    compiled.loss.backward()
    assert (compiled.logits - expected.logits).abs().max() < 1e-10
    for (name, p), q in zip(moe.named_parameters(), other.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-10, name


STEPS = 4
BALANCE = 0.01


def start():
    model = fmoefy(make("llama"), 4, init="upcycle").train()
    return model, {"input_ids": batch(model, None)["input_ids"], "labels": batch(model, None)["input_ids"]}


def by_hand():
    """The losses of a loop in plain PyTorch."""
    model, inputs = start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss + BALANCE * gates.total_loss(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    return losses


class BalancedTrainer(Trainer):
    """The balance loss as fmoefy's documentation adds it."""

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss = super().compute_loss(model, inputs, **options)
        return loss + BALANCE * gates.total_loss(model)


def test_trainer(tmp_path):
    model, inputs = start()
    samples = [{name: value[i] for name, value in inputs.items()} for i in range(2)]
    trainer = BalancedTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            max_grad_norm=0.0,
            logging_steps=1,
            save_steps=STEPS,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=samples,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(by_hand(), rel=1e-4)
    saved = load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_accelerate():
    accelerator = Accelerator(cpu=True)
    model, inputs = start()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    data = torch.utils.data.DataLoader(inputs["input_ids"], batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for _ in range(STEPS):
        for ids in data:
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss + BALANCE * gates.total_loss(model)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(by_hand(), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "path", "notes"),
    [
        (
            BloomConfig(
                vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.1, **NO_TOKENS
            ),
            "h.1.mlp",
            ("its dropout after the last linear layer is left out",),
        ),
        (
            MptConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2, max_seq_len=16),
            "blocks.1.ffn",
            (),
        ),
    ],
    ids=["bloom", "mpt"],
)
def test_mlps_that_add_the_residual_themselves(config, path, notes):
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in dense.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    truth = logits(dense)
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
    assert [(r.path, r.notes) for r in moe.fmoe_report.replaced][1:] == [(f"transformer.{path}", notes)]
    assert (logits(moe) - truth).abs().max() <= 1e-12 * truth.abs().max()
    inputs = batch(moe, torch.float64)
    moe.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(p.grad.isfinite().all() and (p.grad != 0).any() for p in moe.parameters())
    assert torch.equal(logits(copy.deepcopy(moe).eval()), logits(moe.eval()))
    assert (logits(zero_experts(moe)) - truth).abs().max() > 0.01 * truth.abs().max()


def test_random_experts_and_chosen_layers():
    moe = fmoefy(make("qwen3"), 4, top_k=2, layers=[1])
    assert [r.path for r in moe.fmoe_report.replaced] == ["model.layers.1.mlp"]
    experts = moe.model.layers[1].mlp.experts
    assert experts.htoh4.weight.shape == (4, 2 * 12, 16) and experts.htoh4.bias is None
    assert 0.2 < experts.htoh4.weight.std() < 0.4
    assert logits(moe).isfinite().all()


def test_norm_before_the_first_linear_layer_stays():
    """RobertaPreLayerNorm has it inside of `intermediate`."""
    torch.manual_seed(0)
    config = RobertaPreLayerNormConfig(**SIZES, max_position_embeddings=16, pad_token_id=0)
    dense = AutoModelForMaskedLM.from_config(config).double().eval()
    with torch.no_grad():
        for p in dense.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    truth = logits(dense)
    moe = fmoefy(copy.deepcopy(dense), 4, init="upcycle")
    assert moe.fmoe_report.replaced[0].path.endswith("layer.0.intermediate.dense")
    assert (logits(moe) - truth).abs().max() <= 1e-12 * truth.abs().max()
    assert (logits(zero_experts(moe)) - truth).abs().max() > 0.01 * truth.abs().max()


class Clamped(torch.nn.Module):
    """A SwiGLU whose halves are clamped where few numbers are, as in GLM-5-Next."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(24, 16, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-10, 10))


class Scaling(torch.nn.Linear):
    def forward(self, x):
        return 0.9 * super().forward(x)


def scaled(mlp):
    mlp.down_proj = Scaling(24, 16, bias=False)
    return mlp


def hooked(mlp):
    mlp.register_forward_hook(lambda module, args, out: 2 * out)
    return mlp


CHANGED = {
    "clamped": (lambda mlp: Clamped(), "computes none of gelu"),
    "a linear layer of another kind": (scaled, "a Scaling in it computes more than its weight and bias"),
    "a hook": (hooked, "something other than dropout follows its last linear layer"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGED)
def test_mlp_that_is_not_what_was_read_is_refused(change, dtype):
    how, why = CHANGED[change]
    model = make("llama")
    for layer in model.model.layers:
        layer.mlp = how(layer.mlp)
    model.to(dtype)
    before, state = dict(model.named_modules()), torch.get_rng_state()
    Clamped.__module__ = "transformers.models"
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp \(\w+\) looks like an MLP, but .*{why}"):
        fmoefy(model, 4)
    assert dict(model.named_modules()) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_mlp_that_stays_dense_is_named_in_the_report():
    model = make("llama")
    hooked(model.model.layers[1].mlp)
    with pytest.warns(UserWarning, match=r"1 MLPs stay dense \(fmoe_report\.left\): model\.layers\.1\.mlp"):
        report = fmoefy(model, 4).fmoe_report
    assert [r.path for r in report.replaced] == ["model.layers.0.mlp"]
    assert len(report.left) == 1 and report.left[0].startswith(
        "model.layers.1.mlp (LlamaMLP) looks like an MLP"
    )
    assert "left dense: model.layers.1.mlp" in repr(report)
