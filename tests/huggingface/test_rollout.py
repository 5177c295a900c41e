"""fmoe audit --rollout: a model generates the bits that it trains on, or the first module that differs is named."""

import json

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext.audit import AuditError, audit_rollout
from fmoe_ext.audit.cli import main
from fmoe_ext.formats.cli import main as export
from fmoe_ext.ops.batch_invariant import is_batch_invariant
from tests.huggingface.rollout_models import (
    DTYPES,
    MODELS,
    SIZES,
    Changed,
    Sometimes,
    Wrapped,
    make_model,
    texts,
    with_mixer,
)
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", rest_is_slow(MODELS, ["Qwen3Moe", "GptOss", "DeepseekV3"]))
def test_generated_log_probabilities_equal_trained(name, dtype):
    report = audit_rollout(make_model(name, dtype), texts(2, 14))
    assert report.ok and not report.uncovered, str(report)
    assert len(report.ways) == 9 + (torch.get_num_threads() > 1) and all(way.ok for way in report.ways)


@pytest.mark.parametrize("implementation", ["eager", "fmoe"])
def test_other_implementations_of_experts_and_attention(implementation):
    fmoe_ext.huggingface.register()
    model = make_model("Qwen3Moe", torch.bfloat16, attn_implementation="eager")
    model.set_experts_implementation(implementation)
    report = audit_rollout(model, texts(2, 14))
    assert report.ok, str(report)


def test_difference_that_needs_one_text_or_one_thread_is_named():
    """Its forward has the shape of the others only for a batch of one, and only where all else is equal."""

    def add_one(module, args, y):
        return y + 1 if y.shape[:2] == (1, 1) else y

    def add_two(module, args, y):
        return y + 2 if torch.get_num_threads() == 1 else y

    for hook, way in ((add_one, "each text alone, token by token"), (add_two, "on one thread")):
        if torch.get_num_threads() == 1 and hook is add_two:
            continue  # there is no other number to compare with
        model = make_model("Llama")
        model.model.layers[0].mlp.register_forward_hook(hook)
        report = audit_rollout(model, texts(2, 8))
        assert [one.name for one in report.ways if not one.ok] == [way], str(report)
        assert "they part in" in str(report)


def test_without_the_mode_the_first_module_is_named():
    report = audit_rollout(make_model("Qwen3Moe"), texts(2, 14), invariant=False)
    assert not report.ok
    assert "they part in model.layers.0.self_attn.q_proj" in str(report.ways[0])
    assert report.ways[0].equal < 1 and report.ways[0].largest > 0


def test_difference_between_modules_names_the_module_around():
    class Attention(type(make_model("Llama").model.layers[0].self_attn)):
        def forward(self, hidden_states, **kwargs):
            out, weights = super().forward(hidden_states * (1 + hidden_states.shape[1] * 1e-3), **kwargs)
            return out, weights

    model = make_model("Llama")
    model.model.layers[1].self_attn.__class__ = Attention
    report = audit_rollout(model, texts(1, 8))
    assert "the code of model.layers.1.self_attn in front of its q_proj" in str(report.ways[0])


@pytest.mark.parametrize("by_keyword", [False, True])
def test_module_that_writes_into_a_view_of_its_input_is_named(by_keyword):
    model = with_mixer(Changed(lambda x: x * x.shape[1] * 1e-3, "view"), by_keyword)
    report = audit_rollout(model, texts(1, 8))
    assert str(report.ways[0]).endswith("they part in model.layers.1.mixer"), str(report)


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **more}}


def test_default_text_passes_lengths_at_which_the_model_changes():
    """dynamic and longrope change the positions of all tokens; a window only what a token sees."""
    longrope = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6, "original_max_position_embeddings": 27}
    for changes in (rope("dynamic"), rope("longrope", **longrope)):
        length = 27 if "longrope" in str(changes) else 32
        report = audit_rollout(
            make_model("Llama", num_hidden_layers=1, **changes, max_position_embeddings=32)
        )
        assert all(way.ok for way in report.ways[:9])
        differing = [str(way) for way in report.ways if not way.ok]
        assert len(differing) == 4 and all(
            f"tokens, one at a time at {length}" in text for text in differing[:3]
        )
        assert f"DIFFERENT  {length + 4} tokens, generate(): " in differing[3]
        assert "they part in model.rotary_emb" in differing[0]
        assert not report.ok and not report.untried and report.longest == length + 4

    report = audit_rollout(make_model("Llama", num_hidden_layers=1, **rope("linear")))
    assert report.ok and not report.untried and report.longest == 24, str(report)


def test_windows_and_chunks_are_passed():
    config = transformers.MistralConfig(**{**SIZES, "num_hidden_layers": 1}, sliding_window=26)
    report = audit_rollout(transformers.MistralForCausalLM(config).eval())
    assert report.ok and report.longest == 30, str(report)
    assert "what is generated is trained, up to 30 tokens" in str(report)


def test_longer_text_that_cannot_be_trained_ends_no_search():
    def refuse(module, args):
        if args[0].shape[1] > 28:
            raise ValueError("too long")

    config = transformers.MistralConfig(**SIZES, sliding_window=26)
    model = transformers.MistralForCausalLM(config).eval()
    model.model.layers[1] = Wrapped(model.model.layers[1], Sometimes(lambda x: True), False)
    model.model.layers[0].mlp.register_forward_pre_hook(refuse)
    report = audit_rollout(model)
    assert report.longest == 24 and "30 tokens: training raised RuntimeError: model.layers.0" in str(report)
    assert "model.layers.1.mixer" in str(report.uncovered) and not report.ok, str(report)


def test_lengths_that_were_not_tried_are_said():
    model = make_model("Llama", num_hidden_layers=1, **rope("dynamic"), max_position_embeddings=4096)
    for tokens in (None, texts(1, 6)):
        report = audit_rollout(model, tokens)
        assert report.ok, str(report)
        assert "not tried  texts of more than 4,096 tokens: rope of type dynamic changes there" in str(report)
        assert f"up to {24 if tokens is None else 6} tokens" in str(report)
    model = make_model("Llama", num_hidden_layers=1, **rope("dynamic"), max_position_embeddings=12)
    assert "texts of more than 12 tokens" in str(audit_rollout(model, texts(1, 12)).untried)
    assert not audit_rollout(model, texts(1, 13)).untried


def test_way_that_transformers_refuses_is_no_difference():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=48, n_head=4, n_layer=1)
    model = transformers.BloomForCausalLM(config).eval()
    report = audit_rollout(model, texts(2, 9))
    (impossible,) = [way for way in report.ways if way.is_impossible]
    assert impossible.name == "static cache" and not impossible.ok
    assert "impossible static cache: raises without batch_invariant() too: RuntimeError: " in str(impossible)
    assert report.ok, str(report)

    def refuse(module, args):
        if is_batch_invariant() and args[0].shape[1] == 1:
            raise ValueError("only in the mode")

    model = make_model("Llama")
    model.model.layers[0].mlp.register_forward_pre_hook(refuse)
    report = audit_rollout(model, texts(2, 9))
    assert not report.ok and not any(way.is_impossible for way in report.ways)
    assert "only in the mode" in str(report)


def without_cache(name, **sizes):
    """A model whose cache is no past_key_values, or that has none."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=97, pad_token_id=0, **sizes)
    model_class = {"OpenAIGPT": "OpenAIGPTLMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model


RWKV = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
XLSTM = {"hidden_size": 128, "embedding_dim": 128, "num_heads": 4, "num_hidden_layers": 1, "num_blocks": 1}
XLSTM |= {"chunk_size": 4}  # one by one behind the last whole chunk


@pytest.mark.parametrize("name", ["Rwkv", "OpenAIGPT"])
def test_model_without_past_key_values_is_compared_by_generate(name):
    gpt = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    # one text: Transformers' RWKV computes other values for several with its state
    report = audit_rollout(without_cache(name, **(RWKV if name == "Rwkv" else gpt)), texts(1, 8))
    ways = {way.name: way for way in report.ways}
    assert ways["generate()"].ok and ways["token by token"].is_impossible, str(report)
    assert report.ok, str(report)


def test_other_state_without_past_key_values_is_a_difference():
    report = audit_rollout(without_cache("xLSTM", **XLSTM), texts(1, 8))
    assert not report.ok
    (way,) = [way for way in report.ways if way.name == "generate()"]
    assert not way.is_impossible and 0 < way.equal < 1, str(report)
    assert "what is generated is not what is trained" in str(report)


def test_model_that_cannot_generate_is_not_ok():
    model = without_cache("Rwkv", **RWKV)
    model.generate = None
    report = audit_rollout(model, texts(2, 8))
    assert all(way.ok or way.is_impossible for way in report.ways) and not report.ok, str(report)
    assert str(report).endswith("no way to generate could be compared")


@pytest.mark.parametrize(("period", "num_pads"), [(3, 4), (4, 3)])
def test_place_in_the_cache_modulo_a_width_of_padding_is_found(period, num_pads):
    def change(module, args, kwargs):
        x, cache = kwargs["hidden_states"], kwargs["past_key_values"]
        columns = torch.arange(x.shape[1]) + (cache.get_seq_length() if cache else 0)
        return args, {**kwargs, "hidden_states": x * (1 + (columns % period == 0) * 1e-2)[:, None]}

    model = make_model("Llama", num_hidden_layers=1)
    model.model.layers[0].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    report = audit_rollout(model, texts(1, 6))
    differing = [way.name for way in report.ways if not way.ok]
    assert differing == [f"padded on the left by {num_pads}"], str(report)


@pytest.mark.parametrize("kind", ["PrefixTuning", "PromptTuning"])
def test_learned_prompts_are_compared_by_generate(kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, f"{kind}Config")(num_virtual_tokens=5, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model("Llama", num_hidden_layers=1), config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.normal_()
    report = audit_rollout(model, texts(2, 8))
    names = ["padded on the right", "each text alone", "on one thread", "generate()"]
    assert [way.name for way in report.ways if way.name != "on one thread"] == [names[0], names[1], names[3]]
    assert report.ok, str(report)


class Stateful(nn.Module):
    """A module that counts its calls and the mean of its inputs in buffers, one of which it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("halved", torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(48))
        self.register_buffer("last", torch.zeros(1))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        self.halved.mul_(0.5)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.register_buffer("last", x.detach()[:1, 0, 0])
        return torch.zeros_like(x)


def test_buffers_and_random_state_are_left_as_they_were():
    mixer = Stateful()
    model, buffers = with_mixer(mixer), dict(mixer.named_buffers())
    mixer.train().register_forward_hook(lambda *_: torch.rand(1))
    state = torch.get_rng_state()
    audit_rollout(model, texts(2, 9))
    assert torch.equal(torch.get_rng_state(), state)
    assert mixer.num_calls == 0 and mixer.training
    assert all(mixer.get_buffer(name) is t for name, t in buffers.items())
    assert mixer.halved == 1 and not mixer.mean.any() and not mixer.last.any()


def test_float64_is_compared_in_float64():
    report = audit_rollout(make_model("Llama", torch.float64), texts(2, 9), invariant=False)
    (token_by_token,) = [way for way in report.ways if way.name == "token by token"]
    assert not token_by_token.ok and token_by_token.largest < 1e-12, str(report)
    assert audit_rollout(make_model("Llama", torch.float64), texts(2, 9)).ok


def test_nan_equals_nothing():
    model = make_model("Llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    report = audit_rollout(model, texts(2, 9))
    assert not report.ok
    assert "18 of 18 tokens have logits that are NaN: there is nothing to compare" in str(report)


class ByNumber(nn.Module):
    """An embedding of numbers that the code in front of it adds up over all texts of the batch."""

    def __init__(self):
        super().__init__()
        self.router, self.numbers = nn.Linear(48, 7), nn.Embedding(50, 48)

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        return self.numbers((chosen + chosen.sum()) % 50)


def test_embedding_of_numbers_that_differ_already_is_not_blamed():
    torch.manual_seed(0)
    report = audit_rollout(with_mixer(ByNumber()), texts(2, 9))
    (first, *_) = [way for way in report.ways if not way.ok and not way.is_impossible]
    assert first.first == "the code of model.layers.1.mixer in front of its numbers", str(report)


def test_wrong_inputs_are_refused():
    with pytest.raises(AuditError, match="not of a Linear"):
        audit_rollout(nn.Linear(2, 2))
    with pytest.raises(AuditError, match="tokens must be integers"):
        audit_rollout(make_model("Llama"), texts(8))


def mixtral():
    return make_model("Mixtral"), texts(1, 6)


def test_command(capsys, tmp_path):
    assert main([f"{__name__}:mixtral", "--rollout", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert main([f"{__name__}:mixtral", "--rollout", "--steps", "3"]) == 2
    assert "--steps are of a training" in capsys.readouterr().err
    make_model("Llama").save_pretrained(tmp_path)
    assert main([str(tmp_path), "--rollout"]) == 0
    assert "what is generated is trained" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing"), "--rollout"]) == 2


def test_streamed_models_and_packed_weights(tmp_path):
    model = make_model("Qwen3Moe", torch.bfloat16, hidden_size=64, moe_intermediate_size=32, head_dim=16)
    model.save_pretrained(tmp_path / "float")
    arguments = ["--to", "packed", "--type", "mxfp4", "-o", str(tmp_path / "packed")]
    assert export([str(tmp_path / "float"), *arguments]) == 0
    for folder in ("float", "packed"):
        report = audit_rollout(fmoe_ext.stream(tmp_path / folder).eval(), texts(2, 9))
        assert report.ok, f"{folder}: {report}"


def test_fused_adapters():
    peft = pytest.importorskip("peft")
    model = fmoe_ext.huggingface.use(make_model("Qwen3Moe", torch.bfloat16))
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    adapted = peft.get_peft_model(model, config)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, 0, 0.1)
    report = audit_rollout(fmoe_ext.lora.fuse(adapted).eval(), texts(2, 9))
    assert report.ok, str(report)
