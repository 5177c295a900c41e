"""Transformers' MoE models with experts_implementation="fmoe" against "eager"."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from fmoe_ext import huggingface
from fmoe_ext.huggingface.glu import apply_gate, glu_options
from fmoe_ext.testing import assert_close
from tests.huggingface.huggingface_models import ARCHITECTURES, experts_of, make_ids, make_model, step
from tests.sweeps import rest_is_long

transformers = pytest.importorskip("transformers")

GENERATORS = [name for name in ARCHITECTURES if name.endswith("LM")]
FUSED_AND_COMPOSED = ["Qwen3MoeForCausalLM", "GptOssForCausalLM"]
# their experts compute partly in float32 whatever the dtype of the model
ROUNDS_TO_FLOAT32 = ("NemotronHForCausalLM", "MuseSparkTextModel")


@pytest.fixture(scope="module", autouse=True)
def registered():
    huggingface.register()
    huggingface.register()


@pytest.fixture(scope="module")
def models():
    """{architecture: float64 model}: made once, because constructing one takes longer than a step of it."""
    return {name: make_model(name, dtype=torch.float64).eval() for name in ARCHITECTURES}


def with_implementation(model, implementation):
    model.set_experts_implementation(implementation)
    assert set(model.get_experts_implementation().values()) == {implementation}
    return model


def as_one(gradients, like):
    """Every gradient, each divided by the largest element of its counterpart, so that none hides behind others."""
    return torch.cat([(gradients[k] / like[k].abs().max().to(gradients[k].dtype)).flatten() for k in like])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_eager(architecture, models):
    model = models[architecture]
    assert (huggingface.fused_activation(experts_of(model)[0]) is not None) == ARCHITECTURES[
        architecture
    ].fused
    ids = make_ids()
    logits, loss, gradients = step(with_implementation(model, "eager"), ids)
    got_logits, got_loss, got_gradients = step(with_implementation(model, "fmoe"), ids)
    rtol = 1e-6 if architecture in ROUNDS_TO_FLOAT32 else 1e-12
    assert gradients.keys() == got_gradients.keys() and len(gradients) > 10
    for name, expected in {"logits": logits, "loss": loss, **gradients}.items():
        got = {"logits": got_logits, "loss": got_loss, **got_gradients}[name]
        assert expected.norm() > 0, name
        assert (got - expected).norm() <= rtol * expected.norm(), name

    single = make_model(architecture).eval()
    plain_logits, plain_loss, plain_gradients = step(with_implementation(single, "eager"), ids)
    ours_logits, ours_loss, ours_gradients = step(with_implementation(single, "fmoe"), ids)
    assert_close(ours_logits, logits, plain_logits, "logits")
    assert_close(ours_loss, loss, plain_loss, "loss")
    truth, plain, ours = (as_one(g, gradients) for g in (gradients, plain_gradients, ours_gradients))
    assert_close(ours, truth, plain, "gradients")


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM", "AriaTextForCausalLM"])
def test_bfloat16(architecture):
    ids = make_ids()
    low = make_model(architecture, dtype=torch.bfloat16).eval()
    model = make_model(architecture, dtype=torch.float64).eval()
    with torch.no_grad():
        for p, rounded in zip(model.parameters(), low.parameters(), strict=True):
            p.copy_(rounded)
    logits, loss, gradients = step(model, ids)
    plain = step(with_implementation(low, "eager"), ids)
    ours = step(with_implementation(low, "fmoe"), ids)
    assert ours[0].dtype == torch.bfloat16
    assert_close(ours[0], logits, plain[0], "logits")
    assert abs(ours[1] - loss) <= torch.finfo(torch.bfloat16).eps * loss
    assert_close(
        as_one(ours[2], gradients), as_one(gradients, gradients), as_one(plain[2], gradients), "gradients"
    )


@pytest.mark.parametrize("architecture", GENERATORS)
def test_generate_and_round_trip(architecture, models, tmp_path):
    model = models[architecture]
    ids = make_ids(num_tokens=5)
    options = dict(max_new_tokens=6, do_sample=False)
    expected = with_implementation(model, "eager").generate(ids, **options)
    assert expected.shape == (2, 11)
    assert torch.equal(with_implementation(model, "fmoe").generate(ids, **options), expected)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, experts_implementation="fmoe", dtype=torch.float64).eval()
    assert loaded.get_experts_implementation()[""] == "fmoe"
    saved, state = model.state_dict(), loaded.state_dict()
    assert saved.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    with torch.no_grad():
        # not to the last bit: buffers that are not saved, such as rotary frequencies, are computed in another dtype
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", rest_is_long(FUSED_AND_COMPOSED, FUSED_AND_COMPOSED[:1]))
def test_compiles_whole(architecture):
    model = make_model(architecture, "fmoe", num_hidden_layers=1).eval()
    ids = make_ids()
    expected = step(model, ids)
    torch.compiler.reset()
    got = step(torch.compile(model, backend="aot_eager", fullgraph=True), ids)
    assert torch.equal(got[0], expected[0])
    assert all(torch.equal(got[2]["_orig_mod." + name], grad) for name, grad in expected[2].items())


MIXED_LAYERS = ("MiniMaxForCausalLM", "JambaForCausalLM")  # attention and others: no model of one layer


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_has_no_graph_break_that_transformers_own_path_lacks(architecture):
    def breaks(implementation):
        torch.compiler.reset()
        one = {} if architecture in MIXED_LAYERS else {"num_hidden_layers": 1}
        model = make_model(architecture, implementation, **one).eval()
        return torch._dynamo.explain(model)(make_ids()).graph_break_count

    assert breaks("fmoe") <= breaks("grouped_mm")


@pytest.mark.parametrize("architecture", FUSED_AND_COMPOSED)
def test_autocast_and_gradient_checkpointing(architecture):
    ids = make_ids()
    model = make_model(architecture)
    truth = step(make_model(architecture, dtype=torch.float64), ids)
    with torch.autocast("cpu", torch.bfloat16):
        plain = step(with_implementation(model, "eager"), ids)
        ours = step(with_implementation(model, "fmoe"), ids)
    assert abs(ours[1] - truth[1]) <= torch.finfo(torch.bfloat16).eps * truth[1]
    assert_close(
        as_one(ours[2], truth[2]), as_one(truth[2], truth[2]), as_one(plain[2], truth[2]), "gradients"
    )

    expected = step(model, ids)
    model.gradient_checkpointing_enable()
    got = step(model.train(), ids)
    assert torch.equal(got[1], expected[1])
    assert all(torch.equal(got[2][name], grad) for name, grad in expected[2].items())


def test_runs_our_operators(models):
    def operators(architecture):
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            torch.no_grad(),
        ):
            with_implementation(models[architecture], "fmoe")(make_ids())
        return {event.key for event in profile.key_averages() if event.key.startswith("fmoe_ext::")}

    assert operators("Qwen3MoeForCausalLM") == {"fmoe_ext::sort_tokens", "fmoe_ext::expert_mlp"}
    composed = {"sort_tokens", "permute", "grouped_gemm", "grouped_gemm_backward", "unpermute", "clamped_glu"}
    assert operators("GptOssForCausalLM") == {f"fmoe_ext::{name}" for name in composed}


class Experts(torch.nn.Module):
    """An experts module with any of the layouts that Transformers' decorator names; forward says what each means."""

    def __init__(self, config):
        super().__init__()
        E, D, H = 4, 6, 5
        torch.manual_seed(0)
        width = 2 * H if config.has_gate else H
        up = torch.randn((E, D, width) if config.is_transposed else (E, width, D), dtype=torch.float64)
        down = torch.randn((E, H, D) if config.is_transposed else (E, D, H), dtype=torch.float64)
        self.up_name = "gate_up_proj" if config.has_gate else "up_proj"
        self.register_parameter(self.up_name, torch.nn.Parameter(up))
        self.down_proj = torch.nn.Parameter(down)
        if config.has_bias:
            bias = torch.nn.Parameter(torch.randn(E, width, dtype=torch.float64))
            self.register_parameter(self.up_name + "_bias", bias)
            self.down_proj_bias = torch.nn.Parameter(torch.randn(E, D, dtype=torch.float64))
        if config.has_post_expert_norm:
            self.post_expert_norm = torch.nn.LayerNorm(D, dtype=torch.float64)
        self.act_fn = transformers.activations.ACT2FN[config.hidden_act]
        self.num_experts = E

    def forward(self, hidden_states, top_k_index, top_k_weights):
        def linear(x, weight, bias):
            y = x @ (weight if self.is_transposed else weight.mT)
            return y if bias is None else y + bias

        out = torch.zeros_like(hidden_states)
        for token, k in (top_k_index < self.num_experts).nonzero().tolist():
            e = top_k_index[token, k]
            up_bias = getattr(self, self.up_name + "_bias")[e] if self.has_bias else None
            h = linear(hidden_states[token], getattr(self, self.up_name)[e], up_bias)
            a = self._apply_gate(h) if self.has_gate else self.act_fn(h)
            y = linear(a, self.down_proj[e], self.down_proj_bias[e] if self.has_bias else None)
            if self.has_post_expert_norm:
                y = self.post_expert_norm(y)
            out[token] += top_k_weights[token, k] * y
        return out


def make_experts(hidden_act="silu", **layout):
    from transformers.integrations.moe import use_experts_implementation

    decorated = use_experts_implementation(**layout)(type("DecoratedExperts", (Experts,), {}))
    facts = dict(is_transposed=False, has_bias=False, has_gate=True, has_post_expert_norm=False) | layout
    config = transformers.PreTrainedConfig()
    for name, value in dict(facts, hidden_act=hidden_act).items():
        setattr(config, name, value)
    return decorated(config)


def run_experts(experts, implementation, top_k_index):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(7, 3, dtype=torch.float64, generator=generator).requires_grad_()
    experts.config._experts_implementation = implementation
    out = experts(x, top_k_index, weights)
    leaves = [x, weights, *experts.parameters()]
    return [out, *torch.autograd.grad(out, leaves, torch.cos(out.detach()))]


@pytest.mark.parametrize("is_transposed", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("has_post_expert_norm", [False, True], ids=["no_norm", "norm"])
@pytest.mark.parametrize(
    ("has_gate", "hidden_act", "fused"),
    [
        *((True, name, fused) for name, fused in [("silu", "swiglu"), ("gelu", "geglu")]),
        *((True, name, "geglu_tanh") for name in ("gelu_pytorch_tanh", "gelu_new")),
        *((True, name, None) for name in ("relu", "mish", "quick_gelu")),
        *((False, name, name) for name in ("relu", "silu", "gelu")),
        *((False, "swish", "silu"), (False, "gelu_new", "gelu_tanh"), (False, "relu2", "relu2")),
    ],
)
def test_every_layout(is_transposed, has_bias, has_post_expert_norm, has_gate, hidden_act, fused):
    layout = dict(is_transposed=is_transposed, has_bias=has_bias, has_gate=has_gate)
    experts = make_experts(hidden_act, has_post_expert_norm=has_post_expert_norm, **layout)
    assert huggingface.fused_activation(experts) == (None if is_transposed else fused)
    top_k_index = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0], [0, 1, 2], [2, 0, 1], [0, 1, 2], [1, 2, 0]])
    for a, b in zip(
        run_experts(experts, "fmoe", top_k_index), run_experts(experts, "eager", top_k_index), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "layout", [{}, dict(is_transposed=True, has_bias=True), dict(has_post_expert_norm=True)]
)
def test_experts_of_other_ranks_are_dropped(layout):
    experts = make_experts(**layout)
    top_k_index = torch.tensor([[0, 4, 1], [4, 4, 4], [2, 1, 0], [4, 1, 2], [2, 0, 4], [4, 1, 2], [1, 4, 4]])
    experts._is_expert_parallel = True
    got = run_experts(experts, "fmoe", top_k_index)
    for a, b in zip(got, run_experts(experts, "eager", top_k_index), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert got[0][1].abs().sum() == 0
    experts._is_expert_parallel = False
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 4\).* is 4"):
        run_experts(experts, "fmoe", top_k_index)


def test_attributes_that_older_versions_lack():
    experts = make_experts()
    top_k_index = torch.tensor([[0, 2, 1]] * 7)
    expected = run_experts(experts, "fmoe", top_k_index)
    del experts.is_concatenated, experts.has_post_expert_norm, experts._is_expert_parallel
    assert huggingface.fused_activation(experts) == "swiglu"
    for a, b in zip(run_experts(experts, "fmoe", top_k_index), expected, strict=True):
        assert torch.equal(a, b)


def experts_with_own_gates():
    """(family, class) for every experts class of the installed Transformers that defines _apply_gate."""
    folder = Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        if "def _apply_gate" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for cls in vars(module).values():
            if isinstance(cls, type) and "_apply_gate" in vars(cls) and cls.__module__ == module.__name__:
                yield file.parent.name, cls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_gate_of_transformers_with_a_clamp_is_one_operator(dtype):
    found = {}
    for family, cls in experts_with_own_gates():
        if family.startswith("inkling2"):  # its activation takes gate and up
            continue
        experts = cls.__new__(cls)
        torch.nn.Module.__init__(experts)
        # No bfloat16 number is the limit: torch's gradient at the limit itself depends on its version.
        limit = 2.003
        numbers = {"alpha": 1.5, "swiglu_alpha": 1.5, "limit": limit, "swiglu_limit": limit}
        vars(experts).update(numbers, act_fn=torch.nn.SiLU())
        found[family] = glu_options(experts)
        h = (2 * torch.randn(9, 48)).to(dtype).double().requires_grad_()
        expected = experts._apply_gate(h)
        (expected_grad,) = torch.autograd.grad(expected.sum(), h)
        h = h.detach().to(dtype).requires_grad_()
        got = apply_gate(experts, h)
        (grad,) = torch.autograd.grad(got.sum(), h)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=tolerance, atol=tolerance)
    assert found.pop("beam", None) is None  # it computes in float32, also for float64
    known = {
        **dict.fromkeys(("deepseek_v4", "glm5_next", "hy_v4", "hy_v4_vl"), (1.0, limit, 0.0, False, False)),
        **dict.fromkeys(("minimax_m3_vl", "openai_privacy_filter"), (1.5, limit, 1.0, False, False)),
        "gpt_oss": (1.5, limit, 1.0, True, False),
        "step3p7": (1.0, limit, 0.0, False, True),
    }
    assert {family: known.get(family) for family in found} == found


def test_gate_of_another_activation_stays_its_own():
    class Other(torch.nn.Module):
        def _apply_gate(self, h):
            return torch.nn.functional.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1].clamp(max=self.limit)

    experts = Other()
    experts.limit = 1.0
    assert glu_options(experts) is None


def test_gate_that_computes_in_float32():
    experts = make_experts()
    expected = run_experts(experts, "eager", torch.zeros(7, 3, dtype=torch.int64))
    experts._apply_gate = lambda h: type(experts)._apply_gate(experts, h.float())
    got = run_experts(experts, "fmoe", torch.zeros(7, 3, dtype=torch.int64))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_interleaved_weights_are_left_to_their_own_gate():
    assert huggingface.fused_activation(make_experts(is_concatenated=False)) is None


def test_quantised_weights_are_refused():
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

    experts = make_experts()
    for name in ("gate_up_proj", "down_proj"):
        quantised = torch.nn.Parameter(
            getattr(experts, name).detach().to(torch.float8_e4m3fn), requires_grad=False
        )
        setattr(experts, name, quantised)
    with pytest.raises(
        TypeError, match=r"DecoratedExperts has torch\.float8_e4m3fn: leave .* call model\.dequantize\(\)"
    ):
        run_experts(experts, "fmoe", torch.zeros(7, 3, dtype=torch.int64))
    refuse = ALL_FP8_EXPERTS_FUNCTIONS.get_interface("fmoe", None)
    with pytest.raises(TypeError, match=r"FineGrainedFP8Config\(dequantize=True\)"):
        refuse(experts, None, None, None)


def test_missing_or_old_transformers(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.6.2")
    with pytest.raises(
        ImportError, match=r"needs Transformers 5\.7 or newer, but this is 5\.6\.2: pip install -U"
    ):
        huggingface.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers>=5\.7 .*: pip install 'transformers>=5\.7'"):
        huggingface.register()


def switch_transformers():
    sizes = {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_experts": 2}
    config = transformers.SwitchTransformersConfig(**sizes, num_layers=2, num_decoder_layers=2)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def llama4():
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    more = {"num_hidden_layers": 1, "num_local_experts": 2, "pad_token_id": 0}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, **heads, **more))


@pytest.mark.parametrize("make", [switch_transformers, llama4])
def test_use_says_what_stays_eager(make):
    model = make()
    name = type(model).__name__
    with pytest.warns(
        UserWarning, match=f"^{name} has no experts module that Transformers lets others compute"
    ):
        assert huggingface.use(model) is model


def test_use(models, recwarn):
    model = models["MixtralForCausalLM"]
    assert huggingface.use(model) is model
    assert set(model.get_experts_implementation().values()) == {"fmoe"}
    assert not [w for w in recwarn if "experts module" in str(w.message)]
