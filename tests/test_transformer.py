"""FMoETransformerMLP: results and gradients, state_dict, and what torch does to a layer (compile, export, vmap)."""

import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import ACTIVATIONS, expert_functions, mix, run_layer, run_oracle
from torch import nn

from fmoe_ext import FMoETransformerMLP, GShardGate, NaiveGate, SoftmaxGate, SwitchGate
from fmoe_ext.experts import FusedExperts, SquaredReLU, activation_name, to_per_expert_layout
from fmoe_ext.testing import assert_close

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
