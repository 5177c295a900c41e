"""Shared experts: what every token passes besides the experts that it chose."""

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, fmoefy
from fmoe_ext.experts import SharedExperts
from fmoe_ext.gates import SoftmaxGate

D, H = 6, 5


@pytest.mark.parametrize("has_gate", [False, True])
def test_is_the_sum_of_both(has_gate):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(
        4,
        D,
        H,
        activation="silu",
        gate=SoftmaxGate,
        shared_expert_hidden=7,
        shared_expert_gate=has_gate,
    ).double()
    x = torch.randn(3, 4, D, dtype=torch.float64, requires_grad=True)
    shared, mlp = layer.shared_experts, layer.shared_experts.mlp
    layer.shared_experts = None
    alone = layer(x)
    layer.shared_experts = shared
    hidden = nn.functional.silu(nn.functional.linear(x, mlp.htoh4.weight[0], mlp.htoh4.bias[0]))
    beside = nn.functional.linear(hidden, mlp.h4toh.weight[0], mlp.h4toh.bias[0])
    if has_gate:
        beside = beside * (x @ shared.gate.weight.t()).sigmoid()
    parameters = [x, *layer.parameters()]
    ours, expected = layer(x), alone + beside
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), parameters),
        torch.autograd.grad((expected * weight).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert {p.dp_comm for p in shared.parameters()} == {"gate"}
    valid = torch.rand(3, 4) < 0.5
    torch.testing.assert_close(layer(x, valid), expected * valid[..., None], rtol=1e-12, atol=1e-14)


def test_half_precision_and_no_tokens():
    shared = SharedExperts(D, H, "swiglu", bias=False, has_gate=True).bfloat16()
    assert shared(torch.zeros(0, D, dtype=torch.bfloat16)).shape == (0, D)
    assert shared(torch.ones(2, D, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_gate_without_experts():
    with pytest.raises(ValueError, match="needs shared_expert_hidden"):
        FMoETransformerMLP(4, D, H, shared_expert_gate=True)


@pytest.mark.parametrize("init", ["random", "upcycle"])
def test_fmoefy(init):
    torch.manual_seed(0)
    dense = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True).double()
    x = torch.randn(2, 3, D, dtype=torch.float64)
    expected = dense(x)
    model = fmoefy(dense, num_experts=4, init=init, shared_expert_hidden=3, distributed_experts=False)
    out = model(x)
    out.square().sum().backward()
    assert model.linear1.shared_experts.mlp.h4toh.weight.grad.abs().max() > 0
    if init == "upcycle":
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
