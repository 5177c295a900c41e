"""Under batch_invariant() a model generates the bits that it trains on; fmoe audit --rollout says so, or where not."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext.audit import AuditError, audit_rollout
from fmoe_ext.audit.cli import main
from fmoe_ext.formats.cli import main as export
from fmoe_ext.ops.batch_invariant import is_batch_invariant
from tests.sweeps import rest_is_slow

transformers = pytest.importorskip("transformers")

SIZES = {
    **{
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
WINDOWS = {
    "head_dim": 12,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
ROUTED |= {"first_k_dense_replace": 1, "topk_group": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LATENT |= {"num_key_value_heads": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA4 = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True}
GEMMA4 |= {"global_head_dim": 12, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 97}
MODELS = {
    "Qwen3Moe": {**EXPERTS, "head_dim": 12, "norm_topk_prob": True},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "Mixtral": LOCAL,
    "GptOss": {**LOCAL, **WINDOWS},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV2": {**ROUTED, **LATENT, "n_group": 1},
    "DeepseekV3": {**ROUTED, **LATENT, "n_group": 2},
    "Gemma2": WINDOWS,
    "Gemma3": WINDOWS,
    "Gemma4": {**WINDOWS, **GEMMA4, "hidden_size_per_layer_input": 8},
    "Phimoe": LOCAL,
    "Glm4Moe": {**ROUTED, "head_dim": 12, "n_group": 1},
    "GraniteMoe": LOCAL,
    "Llama": {},
    "Qwen3": {"head_dim": 12},
}
DTYPES = (torch.float32, torch.bfloat16)


def make_model(name, dtype=torch.float32, **changes):
    config_class = getattr(
        transformers, f"{name}TextConfig" if name in ("Gemma3", "Gemma4") else f"{name}Config"
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **MODELS[name], **changes}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.new_empty(p.shape).normal_(0, 0.1 if p.dim() > 1 else 0.05, generator=generator))
            p.add_(1.0 if p.dim() == 1 else 0.0)
    return model.to(dtype).eval()


def texts(*shape):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(3))


def log_probabilities(logits):
    return torch.log_softmax(logits.float(), -1)


@torch.no_grad()
def generated(model, tokens, sizes, mask=None, cache=None):
    """Log-probabilities of tokens in parts of the sizes, with a cache."""
    found, begin = [], 0
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    for size in sizes:
        end, given = begin + size, {}
        if mask is not None:
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        out = model(tokens[:, begin:end], past_key_values=cache, use_cache=True, **given)
        cache, begin = out.past_key_values, end
        found.append(out.logits)
    return log_probabilities(torch.cat(found, 1))


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


class Changed(nn.Module):
    """The identity, but for what change(x) adds; where="view" writes it into half of what was given, in place."""

    def __init__(self, change, where="output"):
        super().__init__()
        self.change, self.where = change, where

    def forward(self, x):
        if self.where == "view":
            x[..., : x.shape[-1] // 2].add_(self.change(x[..., : x.shape[-1] // 2]))
            return torch.zeros_like(x)
        return self.change(x)


class Wrapped(nn.Module):
    """A layer of a decoder after another module."""

    def __init__(self, layer, mixer, by_keyword):
        super().__init__()
        self.mixer, self.layer, self.by_keyword = mixer, layer, by_keyword

    def forward(self, hidden_states, *args, **kwargs):
        hidden_states = hidden_states.clone()
        y = self.mixer(x=hidden_states) if self.by_keyword else self.mixer(hidden_states)
        return self.layer(hidden_states + y, *args, **kwargs)


def with_mixer(mixer, by_keyword=False, **changes):
    model = make_model("Llama", **changes)
    model.model.layers[1] = Wrapped(model.model.layers[1], mixer, by_keyword)
    return model


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


@torch.jit.script
def scripted(x):
    return torch.sigmoid(x @ x.mT) @ x


class FirstOf(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)[0]


UNCOVERED = {
    "aten._fft_c2r": lambda x: torch.fft.irfft(torch.fft.rfft(x), 48),
    "aten.mm, computed by torch.ops.aten.mm": lambda x: torch.ops.aten.mm(
        x.flatten(0, 1), torch.eye(48)
    ).view_as(x),
    "aten.bmm": scripted,
    "aten._softmax, computed by softmin": lambda x: nn.functional.softmin(x, -1),
    "aten.mean": lambda x: x.unflatten(-1, (6, 8)).mean((-1, -2))[..., None] + x,
    "aten.index_put": lambda x: torch.zeros_like(x).index_put(
        (torch.arange(len(x)).repeat(2),), torch.cat((x, x)), accumulate=True
    ),
    "aten.angle": lambda x: torch.complex(x, x.cos()).angle(),
    "aten.atan2": lambda x: torch.ops.aten.atan2(x[..., :47], x[..., 1:]).repeat(1, 1, 2)[..., :48],
}
# One that is unknown, one called as an operator, one that TorchScript calls, one of elements whose lengths matter.
QUICK_UNCOVERED = ("aten._fft_c2r", "aten.mm, computed by torch.ops.aten.mm", "aten.bmm", "aten.atan2")


@pytest.mark.parametrize("operator", rest_is_slow(UNCOVERED, QUICK_UNCOVERED))
def test_operators_outside_of_what_is_covered_are_named(operator):
    report = audit_rollout(with_mixer(Changed(UNCOVERED[operator])), texts(2, 9))
    named = [str(one) for one in report.uncovered]
    assert any(operator in one and "model.layers.1.mixer" in one for one in named), str(report)
    assert {one.module for one in report.uncovered} == {"model.layers.1.mixer"}
    assert not report.ok


class Sometimes(nn.Module):
    """The identity by aten.mm where when(x) is true, which batch_invariant() does not cover."""

    def __init__(self, when):
        super().__init__()
        self.when, self.weight = when, nn.Parameter(torch.eye(48))

    def forward(self, x):
        if self.when(x):
            return torch.ops.aten.mm(x.flatten(0, -2), self.weight).view_as(x)
        return nn.functional.linear(x, self.weight)


RARE = {
    "many rows": lambda x: x[..., 0].numel() > 16,
    "few rows": lambda x: x[..., 0].numel() == 1,
    "with gradients": lambda x: torch.is_grad_enabled(),
    "as many rows as with padding": lambda x: x.shape[1] == 12,
}


@pytest.mark.parametrize("when", RARE)
def test_operators_that_only_some_forwards_call_are_named(when):
    report = audit_rollout(with_mixer(Sometimes(RARE[when])), texts(2, 9))
    assert all(way.ok or way.is_impossible for way in report.ways), str(report)
    assert [str(one) for one in report.uncovered] == [
        "aten.mm, computed by torch.ops.aten.mm in model.layers.1.mixer"
    ]
    assert not report.ok and "equal here, but not shown for other texts" in str(report)


def test_operators_of_a_longer_text_are_named():
    config = transformers.MistralConfig(**SIZES, sliding_window=26)
    model = transformers.MistralForCausalLM(config).eval()
    mixer = Sometimes(lambda x: x.shape[1] == 30)  # as a whole
    model.model.layers[1] = Wrapped(model.model.layers[1], mixer, False)
    report = audit_rollout(model)
    assert "model.layers.1.mixer" in str(report.uncovered) and not report.ok, str(report)


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


def test_search_for_operators_that_raises_is_no_success():
    def refuse(module, args):
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise ValueError("not under a dispatch mode")

    model = make_model("Llama")
    model.model.layers[0].mlp.register_forward_pre_hook(refuse)
    report = audit_rollout(model, texts(2, 9))
    assert not report.ok and "not under a dispatch mode" in report.unsearched
    assert "FAILED     the search for operators that are not covered: " in str(report)
    assert "equal here, but not shown for other texts" in str(report)


def softmax_by_hand(x, dim, dtype=None):
    x = x.to(dtype or x.dtype)
    x = (x - x.amax(dim, keepdim=True)).exp()
    return x / x.sum(dim, keepdim=True)


def test_softmax_by_hand_that_is_equal_by_luck_is_named(monkeypatch):
    """Its sum has zeros behind it, of keys that are masked; bfloat16 hides that, but for one token of hundreds."""
    model = make_model("Llama", torch.bfloat16, num_hidden_layers=1, attn_implementation="eager")
    monkeypatch.setattr(nn.functional, "softmax", softmax_by_hand)
    report = audit_rollout(model, texts(2, 9))
    named = [str(one) for one in report.uncovered]
    assert named == ["aten.sum, computed by sum in model.layers.0.self_attn"], str(report)
    assert all(way.ok for way in report.ways) and not report.ok
    assert str(report).endswith("equal here, but not shown for other texts")


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


@pytest.mark.parametrize("kind", rest_is_slow(["LSTM", "GRU", "RNN"], ["LSTM"]))
def test_recurrent_modules_are_named(kind):
    torch.manual_seed(0)
    mixer = FirstOf(getattr(nn, kind)(48, 48, batch_first=True))
    report = audit_rollout(with_mixer(mixer), texts(2, 9))
    assert not report.ok
    assert f"computed by {kind.lower()}" in str(report) and "in model.layers.1.mixer.module" in str(report)


def test_linear_attention_is_refused_by_name():
    config = transformers.Qwen3NextConfig(
        **{**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24, "head_dim": 12},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    )
    report = audit_rollout(transformers.Qwen3NextForCausalLM(config).eval(), texts(1, 8))
    assert not report.ok
    assert "model.layers.0.linear_attn: batch_invariant() promises" in str(report)
    assert "but not with conv1d" in str(report)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_generate_and_a_step_of_training(dtype):
    """generate()'s own log-probabilities, sampled from a padded batch; the loss of training has their gradient."""
    model, tokens = make_model("Qwen3Moe", dtype), texts(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0
    tokens = tokens.masked_fill(mask == 0, 0)
    with fmoe_ext.batch_invariant():
        torch.manual_seed(0)
        out = model.generate(
            **{"input_ids": tokens, "attention_mask": mask, "do_sample": True, "max_new_tokens": 6},
            **{"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None, "top_k": 0},
        )
        sampled = log_probabilities(torch.stack(out.logits, 1))
        for row, begin in ((0, 4), (1, 0), (2, 1)):  # each trained alone
            text = out.sequences[row : row + 1, begin:]
            trained = log_probabilities(model.train()(text).logits[:, -7:-1])
            assert torch.equal(trained[0], sampled[row])
        trained.gather(2, text[:, -6:, None]).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    log_probabilities(model(text).logits[:, -7:-1]).gather(2, text[:, -6:, None]).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            bound = (2e-5 if dtype == torch.float32 else 0.1) * p.grad.abs().max().clamp(min=1e-3)
            assert (found[name] - p.grad).abs().max() <= bound, name


@pytest.mark.parametrize("where", ["inside", "after"])
def test_recomputation_keeps_the_bits(where):
    """A backward inside the block, and after it with the mode passed to the checkpoint."""
    model, tokens = make_model("Qwen3Moe").train(), texts(2, 9)
    options = {"use_reentrant": False}
    if where == "after":
        options["context_fn"] = lambda: (nullcontext(), fmoe_ext.batch_invariant())
    results = []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable(options)
        model.zero_grad()
        with fmoe_ext.batch_invariant():
            loss = model(tokens, labels=tokens, use_cache=False).loss
            if where == "inside":
                loss.backward()
        if where == "after":
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 10
    assert all(map(torch.equal, *results))


LONG_TEXTS = [(name, dtype) for dtype in DTYPES for name in ("Qwen3Moe", "GptOss", "DeepseekV3", "Gemma3")]
IN_CI = [(name, dtype) for name, dtype in LONG_TEXTS if dtype is torch.bfloat16 or name == "Qwen3Moe"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), rest_is_slow(LONG_TEXTS, IN_CI), ids=str)
def test_lengths_batches_paddings_caches_and_threads(name, dtype):
    model, length, threads = make_model(name, dtype), 300, torch.get_num_threads()
    tokens = texts(16, length)
    try:
        torch.set_num_threads(2)
        with fmoe_ext.batch_invariant(), torch.no_grad():
            whole = log_probabilities(model(tokens, use_cache=False).logits)
            assert torch.equal(log_probabilities(model(tokens[3:8], use_cache=False).logits), whole[3:8])
            assert torch.equal(generated(model, tokens[5:12], [17, 64, 1, 1, 100, 117]), whole[5:12])
            for size in (1, 2, 3, 31, 64, 65, 100, 129, 255):
                assert torch.equal(
                    log_probabilities(model(tokens[2:4, :size], use_cache=False).logits), whole[2:4, :size]
                ), size
            for batch in range(1, 17):
                rows = log_probabilities(model(tokens[:batch, :40], use_cache=False).logits)
                assert torch.equal(rows, whole[:batch, :40]), batch
            # What follows are thousands of small products: on busy cores two threads wait for each other at each.
            torch.set_num_threads(1)
            assert torch.equal(log_probabilities(model(tokens[3:8], use_cache=False).logits), whole[3:8])
            assert torch.equal(generated(model, tokens[:1], [1] * length), whole[:1])
            cache = transformers.StaticCache(model.config, max_cache_len=length + 11)
            sizes = [90, *[1] * 30, 100, 80]
            assert torch.equal(generated(model, tokens[:4], sizes, cache=cache), whole[:4])
            for num_pads in (1, 16, 63):
                pads = torch.zeros(4, num_pads, dtype=torch.long)
                left = torch.cat((pads, tokens[:4]), 1)
                mask = (torch.arange(length + num_pads) >= num_pads).long().expand(4, -1)
                sizes = [num_pads + 100, *[1] * 20, length - 120]
                found = generated(model, left, sizes, mask)
                assert torch.equal(found[:, num_pads:], whole[:4]), num_pads
                right = torch.cat((tokens[:4], pads), 1)
                found = generated(model, right, [length + num_pads], mask.flip(1))
                assert torch.equal(found[:, :length], whole[:4]), num_pads
    finally:
        torch.set_num_threads(threads)


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
