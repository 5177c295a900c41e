"""torch.func's reverse mode (grad, vjp, jacrev) through a layer on one rank: the gradients of backward()."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vjp

from fmoe_ext import FMoE, FMoETransformerMLP, ops
from fmoe_ext.gates import GATES

D, E, T = 6, 4, 5
LAYERS = {
    "fused": lambda **options: FMoETransformerMLP(E, D, 5, activation="swiglu", **options),
    "callable activation": lambda **options: FMoETransformerMLP(E, D, 5, activation=torch.tanh, **options),
    "shared": lambda **options: FMoETransformerMLP(
        E, D, 5, shared_expert_hidden=3, shared_expert_gate=True, **options
    ),
    "separate": lambda **options: FMoE(E, D, expert=lambda d: nn.Linear(d, d), **options),
}

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def run(layer, x):
    torch.manual_seed(1)
    return layer(x)


def loss_of(layer, params, x):
    """With the balance loss of the gate."""
    torch.manual_seed(1)
    out = functional_call(layer, params, (x,))
    balance = layer.gate.get_loss()
    return out.square().sum() + (0 if balance is None else balance.sum())


def assert_equals_backward(layer):
    x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    params = {name: p.detach().clone() for name, p in layer.named_parameters()}
    of_params, of_x = grad(lambda params, x: loss_of(layer, params, x), argnums=(0, 1))(params, x)
    leaf = x.clone().requires_grad_()
    loss_of(layer, {}, leaf).backward()
    torch.testing.assert_close(of_x, leaf.grad, rtol=1e-12, atol=1e-13)
    for name, p in layer.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(of_params[name], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("gate", GATES)
def test_grad_of_each_gate_equals_backward(gate):
    torch.manual_seed(0)
    layer = LAYERS["fused"](gate=gate, top_k=1 if gate == "switch" else 2).double()
    # in training these count choices in place, which torch.func refuses
    counts = any(hasattr(layer.gate, name) for name in ("pending_load", "num_quantiles"))
    assert_equals_backward(layer.eval() if counts else layer)


@pytest.mark.parametrize("name", LAYERS)
def test_grad_of_each_kind_of_experts_equals_backward(name):
    torch.manual_seed(0)
    assert_equals_backward(LAYERS[name]().double())


@pytest.mark.parametrize("name", ["fused", "separate"])
def test_jacobian_equals_that_of_backward(name):
    torch.manual_seed(0)
    layer = LAYERS[name](gate="softmax").double()
    x = torch.randn(T, D, dtype=torch.float64)
    expected = torch.autograd.functional.jacobian(lambda x: run(layer, x), x)
    torch.testing.assert_close(jacrev(lambda x: run(layer, x))(x), expected, rtol=1e-12, atol=1e-13)
    out, pull = vjp(lambda x: run(layer, x), x)
    torch.testing.assert_close(pull(torch.ones_like(out))[0], expected.sum((0, 1)), rtol=1e-12, atol=1e-13)


def test_grad_under_autocast_has_the_dtype_of_the_input():
    torch.manual_seed(0)
    layer, x = LAYERS["fused"](), torch.randn(T, D)
    with torch.autocast("cpu", torch.bfloat16):
        ours = grad(lambda x: layer(x).float().square().sum())(x)
        leaf = x.clone().requires_grad_()
        layer(leaf).float().square().sum().backward()
    torch.testing.assert_close(ours, leaf.grad, rtol=0, atol=0)


@pytest.mark.parametrize("transposed", [False, True])
def test_grad_of_grouped_gemm_equals_backward(transposed):
    torch.manual_seed(0)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 2, 4), torch.randn(3, 2)
    weight = weight.mT.contiguous() if transposed else weight

    def loss(x, weight, bias):
        return ops.grouped_gemm(x, weight, offs, bias, transposed).square().sum()

    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    loss(*leaves).backward()
    ours = grad(loss, argnums=(0, 1, 2))(*(leaf.detach() for leaf in leaves))
    for gradient, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-13)


def test_second_derivatives_and_main_gradients_are_refused():
    layer, x = LAYERS["fused"](), torch.randn(T, D)
    with (
        warnings.catch_warnings(),
        pytest.raises(NotImplementedError, match="has no forward-mode derivative"),
    ):
        hessian(lambda x: layer(x).sum())(x)
    fused = LAYERS["fused"](gradient_accumulation_fusion=True)
    with pytest.raises(RuntimeError, match="cannot transform experts with gradient_acc"):
        grad(lambda x: fused(x).sum())(x)
