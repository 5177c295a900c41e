import copy
import functools
import inspect
import io
import pickle
import warnings
from collections import UserList
from typing import get_type_hints

import pytest
import torch
import torch.nn.functional as F
from oracle import ACTIVATIONS, expert_functions, mix, run_layer, run_oracle
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, GShardGate, NaiveGate, SoftmaxGate, SwitchGate
from fmoe_ext.experts import FusedExperts, SquaredReLU, activation_name, to_per_expert_layout
from fmoe_ext.layers import LayerOptions
from fmoe_ext.testing import assert_close
from fmoe_ext.transformer import MLPOptions

T, D, H, E = 13, 6, 10, 5


def make_layer(dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    layer = FMoETransformerMLP(**{"num_expert": E, "d_model": D, "d_hidden": H, "top_k": 2, **options})
    for param in layer.parameters():  # FastMoE's initialisation is too small to tell mistakes from rounding
        nn.init.normal_(param, std=0.5)
    return layer.to(dtype)


def make_input(dtype=torch.float64, shape=(T, D), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def assert_same(ours, truth, rtol=1e-12):
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, truth[name], rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_matches_the_oracle(activation, bias):
    layer = make_layer(activation=activation, bias=bias)
    x, grad_out = make_input()
    topk_idx, _ = layer.gate(x)
    truth = run_oracle(layer, x, grad_out, topk_idx, ACTIVATIONS[activation], torch.float64)
    assert_same(run_layer(layer, x, grad_out), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_experts_of_width_one(activation, dtype):
    """One hidden number is as many of which all others are zero: on a gate of capacity too."""
    for gate in ("softmax", "gshard"):
        one = make_layer(dtype, d_hidden=1, activation=activation, gate=gate).eval()
        wide = make_layer(dtype, d_hidden=16, activation=activation, gate=gate).eval()
        wide.load_state_dict(one.state_dict() | zeros_like_experts(wide))
        rows = [0] if one.experts.htoh4.weight.shape[1] == 1 else [0, 16]
        with torch.no_grad():
            wide.experts.htoh4.weight[:, rows] = one.experts.htoh4.weight
            wide.experts.htoh4.bias[:, rows] = one.experts.htoh4.bias
            wide.experts.h4toh.weight[:, :, :1] = one.experts.h4toh.weight
            wide.experts.h4toh.bias.copy_(one.experts.h4toh.bias)
        x, grad_out = make_input(dtype)
        found = [run_layer(layer, x, grad_out) for layer in (one, wide)]
        found[1]["experts.htoh4.weight"] = found[1]["experts.htoh4.weight"][:, rows]
        found[1]["experts.htoh4.bias"] = found[1]["experts.htoh4.bias"][:, rows]
        found[1]["experts.h4toh.weight"] = found[1]["experts.h4toh.weight"][:, :, :1]
        for name, value in found[0].items():
            torch.testing.assert_close(value, found[1][name], msg=lambda text, name=name: f"{name}: {text}")


def zeros_like_experts(layer):
    return {name: torch.zeros_like(p) for name, p in layer.state_dict().items() if "experts." in name}


@pytest.mark.parametrize("top_k", [1, E])
def test_top_k(top_k):
    layer = make_layer(top_k=top_k, gate=functools.partial(NaiveGate, normalize=False))
    x, grad_out = make_input()
    topk_idx, _ = layer.gate(x)
    truth = run_oracle(layer, x, grad_out, topk_idx, F.gelu, torch.float64)
    assert truth["gate.gate.weight"].abs().max() > 1e-3
    assert_same(run_layer(layer, x, grad_out), truth)


def test_gate_with_another_input_than_the_experts():
    """Choices and weights are those of gate_inp, without its padding; both inputs get their gradient."""
    layer, plain = make_layer(), make_layer()
    x, of_gate = (t.view(1, T, D).requires_grad_() for t in make_input())
    valid = torch.arange(T).view(1, T) % 3 > 0
    out = layer(x, valid, gate_inp=of_gate)
    chosen = plain.gate(of_gate[valid])
    plain.gate.forward = lambda inp: chosen
    expected = torch.zeros_like(x)
    expected[valid] = plain(x[valid])
    assert torch.equal(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), [x, of_gate, *layer.parameters()]),
        torch.autograd.grad(expected.square().sum(), [x, of_gate, *plain.parameters()]),
        strict=True,
    ):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="one number of tokens"):
        layer(x, gate_inp=of_gate[:, 1:])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, activation):
    layer = make_layer(dtype, activation=activation)
    x, grad_out = make_input(dtype)
    topk_idx, _ = layer.gate(x)
    ours = run_layer(layer, x, grad_out)
    plain = run_oracle(layer, x, grad_out, topk_idx, ACTIVATIONS[activation], dtype)
    truth = run_oracle(layer, x, grad_out, topk_idx, ACTIVATIONS[activation], torch.float64)
    for name, value in ours.items():
        assert_close(value, truth[name], plain[name], name)


def test_experts_without_rows_have_zero_gradients():
    layer = make_layer()
    with torch.no_grad():
        layer.gate.gate.weight.zero_()
        layer.gate.gate.bias.copy_(torch.arange(E))
    x, grad_out = make_input()
    grads = run_layer(layer, x, grad_out)
    for name in ("experts.htoh4.weight", "experts.htoh4.bias", "experts.h4toh.weight", "experts.h4toh.bias"):
        norms = grads[name].flatten(1).norm(dim=1)
        assert (norms[:3] == 0).all() and (norms[3:] > 0).all(), name


@pytest.mark.parametrize(
    ("activation", "same_as"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(), "relu"),
        (nn.SiLU(), "silu"),
        (SquaredReLU(), "relu2"),
        (F.gelu, "gelu"),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (F.silu, "silu"),
    ],
)
def test_activations_by_object(activation, same_as):
    assert activation_name(activation) == same_as


@pytest.mark.parametrize("activation", [nn.Sequential(nn.ReLU(), nn.Dropout(0.0)), lambda h: F.relu(h)])
def test_any_callable_activation(activation):
    layer, fused = make_layer(activation=activation), make_layer(activation="relu")
    assert layer.experts.fused_activation is None
    x, grad_out = make_input()
    assert_same(run_layer(layer, x, grad_out), run_layer(fused, x, grad_out))


def test_activation_with_parameters_learns():
    layer = make_layer(activation=nn.PReLU())
    x, _ = make_input()

    def forward(slope):
        return torch.func.functional_call(layer, {"experts.activation.weight": slope}, (x,))

    assert torch.autograd.gradcheck(forward, layer.experts.activation.weight)


@pytest.mark.parametrize("activation", ["gelu", "swiglu", nn.Sequential(nn.GELU())])
def test_experts_alone_take_sorted_rows(activation):
    """FastMoE's _Expert(inp, fwd_expert_count); rows past the counted ones are zero."""
    torch.manual_seed(0)
    experts = FusedExperts(3, D, H, activation).double()
    counts = torch.tensor([4, 0, 3])
    rows, grad_out = make_input(shape=(9, D))
    rows.requires_grad_()
    out = experts(rows, counts)
    functions = expert_functions(experts, ACTIVATIONS[activation] if isinstance(activation, str) else F.gelu)
    topk_idx = torch.tensor([0, 0, 0, 0, 2, 2, 2, -1, -1])[:, None]
    truth = mix(rows, topk_idx, torch.ones(9, 1), functions)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)
    params = [rows, experts.htoh4.weight, experts.h4toh.bias]
    ours, theirs = (torch.autograd.grad(o, params, grad_out) for o in (out, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_leading_dimensions():
    layer = make_layer()
    x, _ = make_input(shape=(2, 3, 4, D))
    out = layer(x)
    assert torch.equal(out, layer(x.reshape(-1, D)).reshape(2, 3, 4, D))
    assert torch.equal(layer(x[0, 0, 0]), layer(x[0, 0, :1])[0])
    transposed = x.reshape(-1, D).t().contiguous().t()
    torch.testing.assert_close(layer(transposed), out.reshape(-1, D), rtol=1e-12, atol=1e-12)


def test_no_tokens():
    layer = make_layer()
    x, grad_out = make_input(shape=(0, D))
    result = run_layer(layer, x, grad_out)
    assert result["out"].shape == (0, D) and result["x"].shape == (0, D)
    assert all(not grad.any() for grad in result.values())


@pytest.mark.bad_indices
def test_rejects():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"\[\.\.\., d_model=6\], but got \[13, 7\]"):
        layer(torch.randn(T, D + 1))
    with pytest.raises(ValueError, match="top_k must be between 1 and the 5 experts, but got 6"):
        make_layer(top_k=6)
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .* but got 'tanh'"):
        make_layer(activation="tanh")
    with pytest.raises(TypeError, match="activation must be a name or a callable, but got 3"):
        make_layer(activation=3)
    with pytest.raises(
        TypeError, match=r"tokens are torch\.float64, but the weights of their experts torch\.float32: "
    ):
        make_layer().float()(torch.zeros(3, D, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed\.init_process_group"):
        make_layer(world_size=2)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.cpu("its autocast is the one that is tested")
@pytest.mark.parametrize("weights", FLOATS)
@pytest.mark.parametrize("tokens", FLOATS)
def test_tokens_are_cast_to_the_dtype_of_the_weights_but_float64_never(tokens, weights):
    layer, x = make_layer().to(weights), torch.randn(3, D, dtype=tokens)
    if tokens == torch.float64 != weights:
        with pytest.raises(TypeError, match=r"tokens are torch\.float64, but the weights of their experts"):
            layer(x)
        return
    with torch.no_grad():
        topk_idx, topk_weights = layer.gate(x)
        layer.gate.forward = lambda inp: (topk_idx, topk_weights)  # which sees the tokens as they came
        out = layer(x)
        assert out.dtype == weights
        assert torch.equal(out, layer(x.to(weights)))


@pytest.mark.cpu("names the CPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_device_and_dtype_are_those_of_all_parameters(dtype):
    layer = FMoETransformerMLP(
        E, D, 5, gate="sigmoid", shared_expert_hidden=3, shared_expert_gate=True, device="cpu", dtype=dtype
    )
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer.gate.expert_bias.dtype == torch.float32
    assert layer(torch.randn(3, D, dtype=dtype)).dtype == dtype
    separate = FMoE(E, D, expert=lambda d: nn.Linear(d, d), dtype=dtype)
    assert {p.dtype for p in separate.parameters()} == {dtype}
    meta = FMoETransformerMLP(E, D, 5, gate="sigmoid", shared_expert_hidden=3, device="meta")
    assert {t.device.type for t in (*meta.parameters(), *meta.buffers())} == {"meta"}
    torch.manual_seed(3)
    ours = FMoETransformerMLP(E, D, 5, device="cpu", dtype=torch.float32).state_dict()
    torch.manual_seed(3)
    for name, value in FMoETransformerMLP(E, D, 5).state_dict().items():
        assert torch.equal(ours[name], value)


def test_arguments_of_the_layer_are_named_and_typed():
    ours = inspect.signature(FMoETransformerMLP.__init__).parameters
    theirs = inspect.signature(FMoE.__init__).parameters
    hints, of_layer = (get_type_hints(cls.__init__) for cls in (FMoETransformerMLP, FMoE))
    options = get_type_hints(MLPOptions)
    for name, parameter in theirs.items():
        if name in ours and name not in ("self", "options", "d_model"):  # d_model must be given
            assert ours[name].default == parameter.default
        if name not in ("self", "expert", "options", "d_model"):
            assert {**options, **hints}[name] == of_layer[name]
    assert get_type_hints(LayerOptions).items() <= {**options, **hints}.items()
    assert len(ours) - len(("self", "options")) <= 16


@pytest.mark.parametrize("cls", [FMoE, FMoETransformerMLP])
def test_number_of_experts_is_given_in_all_or_for_a_rank(cls):
    for given in ({"num_experts": 6}, {"num_expert": 6}):
        layer = cls(**given, d_model=D, top_k=1)
        assert (layer.num_experts, layer.num_local_experts) == (6, 6)
    assert cls(d_model=D).num_experts == 32
    with pytest.raises(ValueError, match=r"num_experts=6 .* and num_expert=6 .* say the same thing"):
        cls(num_experts=6, num_expert=6, d_model=D)
    with pytest.raises(ValueError, match=r"num_experts=7 .* must be a multiple of the 2 ranks"):
        cls(num_experts=7, world_size=2, d_model=D)
    with pytest.raises(ValueError, match="num_experts must be at least 1, but got 0"):
        cls(num_experts=0, d_model=D)
    with pytest.raises(TypeError, match=r"'n_experts' \(did you mean 'num_experts'\?\)"):
        cls(n_experts=6, d_model=D)


def test_number_of_experts_and_their_list_agree():
    experts = [nn.Identity] * 3
    assert (
        FMoE(num_experts=3, d_model=D, expert=[lambda d_model: nn.Linear(d_model, d_model)] * 3).num_experts
        == 3
    )
    with pytest.raises(ValueError, match=r"num_experts=4 gives each of 1 ranks 4 experts, .* a list of 3"):
        FMoE(num_experts=4, d_model=D, expert=experts)
    # as in FastMoE, a list wins over num_expert, whatever kind of list it is
    linear = [lambda d_model: nn.Linear(d_model, d_model)] * 3
    for kind in (list, tuple, UserList):
        layer = FMoE(num_expert=5, d_model=D, expert=kind(linear))
        assert layer.num_experts == layer.num_local_experts == len(layer.experts) == 3
    with pytest.raises(TypeError, match=r"expert= is a callable, or a list of them, but got <generator"):
        FMoE(num_expert=3, d_model=D, expert=(make for make in linear))


def test_state_dict_layouts():
    layer = make_layer(seed=0)
    x, _ = make_input()
    state = layer.state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == {
        "gate.gate.weight": [E, D],
        "gate.gate.bias": [E],
        "experts.htoh4.weight": [E, H, D],
        "experts.htoh4.bias": [E, H],
        "experts.h4toh.weight": [E, D, H],
        "experts.h4toh.bias": [E, D],
    }
    per_expert = to_per_expert_layout(state)
    assert len(per_expert) == 2 + 4 * E
    assert torch.equal(per_expert["experts.3.htoh4.weight"], state["experts.htoh4.weight"][3:4])
    wrapped = {f"module.{key}": value for key, value in per_expert.items()}
    for saved in (state, per_expert, wrapped):
        keys = list(saved)
        other = make_layer(seed=1)
        assert not torch.equal(other(x), layer(x))
        assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
        assert torch.equal(other(x), layer(x))
        assert list(saved) == keys  # the caller's dict is left alone
    model, saved = nn.Sequential(make_layer(seed=1)), nn.Sequential(layer).state_dict()
    model.load_state_dict(to_per_expert_layout(saved))
    assert torch.equal(model(x), layer(x))


def test_state_dict_errors_are_reported():
    layer = make_layer()
    per_expert = to_per_expert_layout(layer.state_dict())
    missing = {key: value for key, value in per_expert.items() if key != "experts.2.h4toh.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "experts.h4toh.bias"'):
        layer.load_state_dict(missing)
    more = to_per_expert_layout(make_layer(num_expert=E + 1).state_dict())
    result = layer.load_state_dict({k: v for k, v in more.items() if "gate" not in k}, strict=False)
    assert result.missing_keys == ["gate.gate.weight", "gate.gate.bias"]
    assert set(result.unexpected_keys) == {
        f"experts.{E}.{name}.{kind}" for name in ("htoh4", "h4toh") for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("gate", [NaiveGate, SwitchGate, GShardGate])
def test_copies(gate):
    layer = make_layer(gate=gate, expert_dp_comm="moe").eval()
    x, grad_out = make_input()
    layer(x)
    assert layer.gate.loss.requires_grad or gate is NaiveGate
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(buffer, weights_only=False),
    ):
        assert not other.gate.has_loss
        assert {p.dp_comm for p in other.experts.parameters()} == {"moe"}
        assert {p.dp_comm for p in other.gate.parameters()} == {"gate"}
        assert_same(run_layer(other, x, grad_out), run_layer(layer, x, grad_out), rtol=0)


def test_autocast():
    layer = make_layer(torch.float32)
    x, grad_out = make_input(torch.float32)
    topk_idx, topk_weights = layer.gate(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        auto_idx, auto_weights = layer.gate(x)
        ours = run_layer(layer, x, grad_out)
        from_bf16 = layer(x.bfloat16())
    assert torch.equal(auto_idx, topk_idx) and torch.equal(
        auto_weights, topk_weights
    )  # the gate stays in float32
    assert ours["out"].dtype == from_bf16.dtype == torch.bfloat16
    assert ours["x"].dtype == ours["experts.htoh4.weight"].dtype == torch.float32
    plain = run_oracle(layer, x, grad_out, topk_idx, F.gelu, torch.bfloat16)
    truth = run_oracle(layer, x, grad_out, topk_idx, F.gelu, torch.float64)
    for name, value in ours.items():
        assert_close(value.bfloat16(), truth[name], plain[name], name)


def test_parameters_choose_the_dtype():
    layer = make_layer(torch.bfloat16)
    x, _ = make_input(torch.float32)
    counts = torch.tensor([T, 0, 0, 0, 0])
    assert torch.equal(layer.experts(x, counts), layer.experts(x.bfloat16(), counts))
    assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("gate", [NaiveGate, functools.partial(SwitchGate, capacity=(0.8, 0.8))])
def test_checkpoint(gate, use_reentrant):
    layer = make_layer(gate=gate)
    x, grad_out = make_input()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=use_reentrant)

    def grads_of(module):
        torch.manual_seed(5)  # the jitter of SwitchGate
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        module(leaf).backward(grad_out)
        return {"x": leaf.grad, **{name: param.grad for name, param in layer.named_parameters()}}

    assert_same(grads_of(Checkpointed()), {k: v.clone() for k, v in grads_of(layer).items()}, rtol=0)


def test_used_twice_in_a_graph():
    layer = make_layer()
    x, grad_out = make_input()
    params = [x.requires_grad_(), *layer.parameters()]
    twice = torch.autograd.grad(layer(layer(x)), params, grad_out)
    middle = layer(x).detach().requires_grad_()
    upper = torch.autograd.grad(layer(middle), [middle, *layer.parameters()], grad_out)
    lower = torch.autograd.grad(layer(x), params, upper[0])
    torch.testing.assert_close(twice[0], lower[0], rtol=1e-12, atol=1e-12)
    for both, a, b in zip(twice[1:], upper[1:], lower[1:], strict=True):
        torch.testing.assert_close(both, a + b, rtol=1e-12, atol=1e-12)


def test_forward_keeps_no_state_but_the_loss():
    """nn.DataParallel replicas lose attributes that are set in forward."""
    layer = make_layer(gate=SwitchGate)
    before = {name: dict(vars(module)) for name, module in layer.named_modules()}
    x, _ = make_input()
    layer(x)
    before["gate"]["_last_loss"] = vars(layer.gate)["_last_loss"]
    for name, module in layer.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert all(vars(module)[key] is value for key, value in before[name].items())
    layer.eval()
    assert torch.equal(nn.DataParallel(layer)(x), layer(x))


@pytest.fixture
def one_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(one_process_group):
    layer = make_layer()
    x, grad_out = make_input()
    plain = run_layer(layer, x, grad_out)
    wrapped = nn.parallel.DistributedDataParallel(
        layer
    )  # collected before the backward, it would reduce nothing
    wrapped(x).backward(grad_out)
    for name, param in layer.named_parameters():
        torch.testing.assert_close(param.grad, plain[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("gate", "activation"),
    [(NaiveGate, "swiglu"), (SwitchGate, "gelu"), (GShardGate, nn.Sequential(nn.GELU()))],
)
def test_compile_is_one_graph(gate, activation):
    """fullgraph also proves that the forward never waits for the value of a tensor: that breaks the graph."""
    layer = make_layer(gate=gate, activation=activation).eval()
    x, grad_out = make_input()
    eager = run_layer(layer, x, grad_out)
    loss = layer.gate.get_loss()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    torch.testing.assert_close(layer.gate.get_loss(), loss, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out, list(layer.parameters()), grad_out)
    names = [name for name, _ in layer.named_parameters()]
    assert_same(dict(zip(names, grads, strict=True)), {name: eager[name] for name in names})
    torch.testing.assert_close(out, eager["out"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", [NaiveGate, GShardGate])
def test_export(gate):
    layer = make_layer(gate=gate).eval()
    x, _ = make_input()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: rows},))
    longer, _ = make_input(shape=(3 * T, D))
    torch.testing.assert_close(program.module()(longer), layer(longer), rtol=1e-12, atol=1e-12)


@pytest.mark.cpu("names the device")
@pytest.mark.parametrize("gate", [NaiveGate, SwitchGate, GShardGate])
def test_on_meta(gate):
    layer = make_layer(gate=gate).to("meta")
    out = layer(torch.empty(3, 5, layer.d_model, device="meta"))
    assert out.shape == (3, 5, layer.d_model) and out.device.type == "meta"


def test_vmap():
    layer = make_layer()
    x, _ = make_input()
    batch = torch.stack([x, x + 1])
    expected = torch.stack([layer(x), layer(x + 1)])
    torch.testing.assert_close(torch.vmap(layer)(batch), expected, rtol=1e-12, atol=1e-12)


def test_forward_mode_is_refused():
    """PyTorch would take the result of an operator without such a derivative for a constant."""
    layer = make_layer()
    x, _ = make_input()
    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative .* use reverse mode"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [
        ("d_model", 0, "at least 1, but got 0"),
        ("d_hidden", 0, "at least 1, but got 0"),
        ("num_expert", 2.5, "a whole number, but got 2"),
        ("d_model", "16", "a whole number, but got '16'"),
    ],
)
def test_sizes_that_are_none(name, size, error):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be {error}"):
        FMoETransformerMLP(**{"num_expert": 4, "d_model": 8, "d_hidden": 6, name: size})


def test_layer_without_d_model_asks_for_it():
    with pytest.raises(TypeError, match=r"FMoETransformerMLP needs d_model, .*num_experts=8, d_model=512"):
        FMoETransformerMLP()
    with pytest.raises(TypeError, match="needs d_model"):
        FMoETransformerMLP(num_expert=2, d_hidden=4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda h: h[:4], ValueError, "one number of tokens"),
        (lambda h: h[:, :8], ValueError, r"gate_inp must have shape \[..., d_model=16\], but got \[5, 8\]"),
        (lambda h: h.long(), TypeError, "gate_inp must have tokens of a floating dtype, but got torch.int64"),
    ],
)
def test_wrong_inputs_of_a_gate_are_refused_by_name(change, error, message):
    layer = FMoETransformerMLP(num_expert=4, d_model=16, d_hidden=8)
    with pytest.raises(error, match=message):
        layer(torch.randn(5, 16), gate_inp=change(torch.randn(5, 16)))


@pytest.mark.parametrize(
    ("keyword", "text"),
    [
        ("hidden_size", "d_hidden is the width inside an expert, d_model that of a token"),
        ("intermediate_size", "did you mean 'd_hidden'"),
        ("num_experts_per_tok", "did you mean 'top_k'"),
        ("dropout", "put nn.Dropout behind the layer"),
    ],
)
def test_names_of_other_libraries_lead_to_ours(keyword, text):
    with pytest.raises(TypeError, match=text):
        FMoETransformerMLP(4, 8, **{keyword: 2})


def test_width_that_is_left_out_follows_the_tokens():
    layer = FMoETransformerMLP(2, 8)
    assert layer.d_hidden == 32 and layer.experts.htoh4.weight.shape == (2, 32, 8)


def dtensor(x):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (1,)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.numpy(), r"a ndarray: make one with torch.as_tensor\(x\)"),
        (lambda x: {"x": x}, "a dict: a nest of tensors needs an FMoE"),
        (lambda x: nn.utils.rnn.pack_sequence([x]), r"a PackedSequence: call the layer on x.data"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), r"nested.*x.values\(\)"),
        (dtensor, r"a DTensor: pass x.to_local\(\)"),
    ],
    ids=["numpy", "dict", "packed", "jagged", "dtensor"],
)
def test_input_that_is_no_plain_tensor_is_named(make, text, one_process_group):
    with pytest.raises(TypeError, match=f"inp must be a plain tensor, but is .*{text}"):
        FMoETransformerMLP(2, 8)(make(torch.randn(5, 8)))


@pytest.mark.parametrize("gate", ["naive", "softmax"])
def test_tokens_on_another_device_are_named(gate):
    layer = FMoETransformerMLP(2, 8, gate=gate)
    with pytest.raises(RuntimeError, match=r"tokens are on meta, but the gate's weight on cpu: .*layer.to"):
        layer(torch.randn(5, 8, device="meta", requires_grad=True))


def test_cast_of_tokens_warns_once(monkeypatch):
    monkeypatch.setattr("fmoe_ext.linear._noted_casts", set())
    layer, x = FMoETransformerMLP(2, 8).bfloat16(), torch.randn(5, 8)
    text = r"tokens are torch.float32 and are cast to torch.bfloat16.*layer.to\(torch.float32\).*autocast"
    with pytest.warns(UserWarning, match=text):
        assert layer(x).dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer.float()(x)


@pytest.mark.parametrize(
    "gate",
    [
        functools.partial(SwitchGate, capacity=(1.2, 0.7)),
        GShardGate,
        functools.partial(SoftmaxGate, capacity_factor=0.9, drop_policy="score"),
    ],
)
def test_saved_export_drops_over_the_capacity_of_any_batch(gate):
    layer = FMoETransformerMLP(4, 8, 16, gate=gate).eval()
    sizes = ({0: torch.export.Dim("T", min=2, max=4096)},)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (torch.randn(12, 8),), dynamic_shapes=sizes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for num_tokens in (5, 33):
        x = torch.randn(num_tokens, 8)
        assert torch.equal(loaded(x), layer(x))


def test_onnx_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match="ONNX has no operators for an FMoE layer: export the model with"):
        torch.export.export(FMoETransformerMLP(2, 8).eval(), (torch.randn(5, 8),))


@pytest.mark.parametrize("grad", [False, True])
def test_onnx_by_a_trace_is_refused_by_name(grad):
    layer, x = FMoETransformerMLP(2, 8).eval(), torch.randn(5, 8)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the dynamo export is newer
        with pytest.raises(
            RuntimeError, match="ONNX has no operators for an FMoE layer: export the model with"
        ):
            torch.onnx.export(layer, (x,), io.BytesIO(), dynamo=False)
        with torch.no_grad():
            assert torch.equal(torch.jit.trace(layer, (x,))(x), layer(x))
