"""fmoe.gates in half precision, FastMoE's initial values, and the module tree without install()."""

import importlib
import math

import pytest
import torch

import fmoe_ext
import fmoe_ext.compat as fmoe
from fmoe_ext.compat.gates.faster_gate import FasterGate, gen_faster_gate

D, E, T = 6, 4, 20
GATES = ["NaiveGate", "NoisyGate", "GShardGate", "SwitchGate", "DCGate", "SwipeGate", "ZeroGate"]


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_have_the_dtype_of_the_model(name, dtype):
    torch.manual_seed(0)
    gate = getattr(fmoe.gates, name)(D, E, 1).eval()
    ours = getattr(fmoe_ext, name)(D, E, 1).eval()
    ours.load_state_dict(gate.state_dict())
    x = torch.randn(T, D).to(dtype)
    (topk_idx, topk_weights), (wide_idx, wide_weights) = gate.to(dtype)(x), ours.to(dtype)(x)
    assert topk_weights.dtype == dtype and torch.equal(topk_idx, wide_idx)
    # the softmax of the chosen scores is torch's there, which differs in the last bit
    rtol = 4 * torch.finfo(wide_weights.dtype if dtype.itemsize > 2 else dtype).eps
    torch.testing.assert_close(topk_weights, wide_weights.to(dtype), rtol=rtol, atol=0)
    assert isinstance(gate, getattr(fmoe_ext, name))
    if name not in ("NoisyGate", "ZeroGate"):
        assert isinstance(gate, fmoe.gates.NaiveGate), "as in FastMoE"
        assert gate(x, return_all_scores=True)[2].shape == (T, E)


@pytest.mark.parametrize("name", ["NaiveGate", "GShardGate", "DCGate"])
def test_weights_are_the_softmax_of_the_chosen_scores_to_the_bit(name):
    """FastMoE's test of GShardGate compares with ==."""
    torch.manual_seed(0)
    gate = getattr(fmoe.gates, name)(64, 8, 1).eval()
    x = torch.randn(200, 64)
    topk_idx, topk_weights, logits = gate(x, return_all_scores=True)
    expected = logits.topk(2).values.softmax(-1)
    assert torch.equal(topk_weights, expected)
    layer = fmoe.FMoETransformerMLP(8, 64, 8, gate=getattr(fmoe.gates, name))
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)
    out.sum().backward()
    again = x.clone().requires_grad_()
    torch.manual_seed(1)
    layer(again).sum().backward()
    assert torch.equal(leaf.grad, again.grad)


@pytest.mark.cpu("its autocast is the one that is tested")
def test_weights_under_autocast():
    gate = fmoe.gates.NaiveGate(D, E, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert gate(torch.randn(T, D))[1].dtype == torch.bfloat16


def test_layers_have_these_gates():
    torch.manual_seed(0)
    for layer in (fmoe.FMoE(E, D, expert=lambda d: torch.nn.Linear(d, d)), fmoe.FMoETransformerMLP(E, D, 8)):
        assert type(layer.gate) is fmoe.gates.NaiveGate and isinstance(layer, fmoe.FMoE)
        out = layer.bfloat16()(torch.randn(T, D, dtype=torch.bfloat16))
        assert out.dtype == torch.bfloat16
    layer = fmoe.FMoE(E, D, gate=gen_faster_gate(0), expert=lambda d: torch.nn.Linear(d, d)).half()
    assert isinstance(layer.gate, FasterGate)
    assert layer.gate(torch.randn(T, D, dtype=torch.float16))[1].dtype == torch.float16


def test_initial_values():
    """FastMoE's fan-in is that of all three dimensions, its biases are zero; fmoe_ext draws as nn.Linear."""
    torch.manual_seed(0)
    bound = 1 / math.sqrt(50 * 80)
    mlp = fmoe.FMoETransformerMLP(4, 50, 80)
    for linear in (fmoe.FMoELinear(4, 50, 80), mlp.experts.htoh4, mlp.experts.h4toh):
        assert 0.99 * bound < linear.weight.abs().max() <= bound
        assert not linear.bias.any()
    assert fmoe_ext.FMoETransformerMLP(4, 50, 80).experts.htoh4.weight.abs().max() > 5 * bound


def test_attributes_without_install():
    module = fmoe
    for name in (
        "balance",
        "functions",
        "gates",
        "layers",
        "linear",
        "megatron",
        "transformer",
        "utils",
        "fastermoe",
    ):
        assert getattr(module, name) is importlib.import_module(f"fmoe_ext.compat.{name}")
    assert module.gates.utils.limit_by_capacity and module.megatron.get_balance_profile() is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense
