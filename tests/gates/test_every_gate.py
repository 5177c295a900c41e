"""Promises that every gate of GATES keeps."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, gates
from fmoe_ext.gates import GATES, BaseGate, find_gate, gen_faster_gate
from tests.sweeps import rest_is_long

D, E = 8, 8
NEED_TWO = ("gshard", "dc", "faster")  # defined for two experts a token
WITHOUT_PARAMETERS = ("zero",)
TOP_K = [(name, k) for name in GATES for k in (1, 2, 3, 4) if k == 2 or name not in NEED_TWO]


def make(name, top_k=2, seed=0):
    torch.manual_seed(seed)
    return find_gate(name)(D, E, 1, top_k)


def tokens(num=24, dtype=torch.float32):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(gate, x, seed=2):
    torch.manual_seed(seed)
    return gate(x)


@pytest.mark.parametrize(("name", "top_k"), TOP_K)
@pytest.mark.parametrize("training", [True, False])
def test_in_a_layer_it_is_the_loop_over_tokens(name, top_k, training):
    torch.manual_seed(0)
    layer = FMoE(E, D, top_k=top_k, gate=GATES[name], expert=lambda d: nn.Linear(d, d)).double()
    layer.train(training)
    x = tokens(dtype=torch.float64).requires_grad_()
    out = run(layer, x)
    topk_idx, topk_weights = run(layer.gate, x)
    assert topk_idx.dtype == torch.int64
    assert topk_idx.shape == topk_weights.shape
    expected = torch.zeros_like(x)
    for t in range(len(x)):
        for e, weight in zip(topk_idx[t].tolist(), topk_weights[t], strict=True):
            if e >= 0:
                expected[t] = expected[t] + weight * layer.experts[e](x[t])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    parameters = [x, *layer.parameters()]
    ours = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad(
        expected.square().sum(), parameters, allow_unused=True, materialize_grads=True
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GATES)
def test_deterministic_for_a_seed_and_a_copy(name):
    gate, x = make(name), tokens()
    for other in (gate, copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        for ours, theirs in zip(run(other, x), run(gate, x), strict=True):
            assert torch.equal(ours, theirs)
    gate.eval()
    for ours, theirs in zip(run(gate, x, seed=5), run(gate, x, seed=6), strict=True):
        assert torch.equal(ours, theirs), "evaluation has no noise"


def assert_same(ours, theirs):
    """The same bits; on CUDA wide_linear adds its products, exact in float32, in another order than for wide tensors.

    Computed in the half precision they would be 1e-3 off.
    """
    tolerance = 5e-6 if ours.is_cuda else 0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in GATES if name not in WITHOUT_PARAMETERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_float32(name, dtype):
    half, x = make(name).to(dtype).eval(), tokens(dtype=dtype)
    wide = copy.deepcopy(half).float()
    for ours, theirs in zip(run(half, x), run(wide, x.float()), strict=True):
        assert_same(ours, theirs)
    assert run(half, x)[1].dtype == torch.float32
    losses = [gate.get_loss() for gate in (half, wide)]
    if losses != [None, None]:
        assert_same(*losses)
    with torch.autocast(x.device.type, torch.bfloat16):
        for ours, theirs in zip(run(wide, x.float()), run(half, x), strict=True):
            assert_same(ours, theirs)


# The others are traced in a layer: tests/compiled/test_matrix_compiled.py.
@pytest.mark.parametrize("name", rest_is_long(GATES, ["naive", "noisy", "quantile", "sigmoid", "sinkhorn"]))
def test_compiles_without_graph_breaks(name):
    gate, x = make(name).eval(), tokens()
    topk_idx, topk_weights = run(gate, x)
    loss = gate.get_loss()
    torch._dynamo.reset()
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    ours_idx, ours_weights = run(compiled, x)
    assert torch.equal(ours_idx, topk_idx)
    torch.testing.assert_close(ours_weights, topk_weights)
    if loss is not None:
        torch.testing.assert_close(gate.get_loss(), loss)


def test_compiled_training_counts_the_load():
    gate, x = make("sigmoid"), tokens()
    torch._dynamo.reset()
    topk_idx, _ = torch.compile(gate, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(gate.pending_load, topk_idx.flatten().bincount(minlength=E))
    gate.update_bias()
    assert gate.expert_bias.abs().max() > 0


def test_reset_parameters_fills_what_to_empty_leaves_unset():
    """The way of FSDP and others: made on the meta device, given memory, then reset, module by module."""
    options = {"sigmoid": {}, "softmax": {"balance_loss": "running"}}
    for name, option in options.items():
        with torch.device("meta"):
            gate = find_gate(name)(D, E, 1, 2, **option)
        fill_memory(gate.to_empty(device="cpu"))
        gate.reset_parameters()
        assert all((buffer == 0).all() for buffer in gate.buffers())
    faster = gen_faster_gate(0)(D, 4, 2)
    expected = faster.is_local.clone()
    fill_memory(faster)
    faster.reset_parameters()
    assert torch.equal(faster.is_local, expected)


def fill_memory(module):
    for buffer in module.buffers():
        buffer.fill_(7)


def test_token_of_nan_that_experts_choose_gives_nan():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, 2 * D, gate="expert_choice")
    x = tokens()
    x[5, 2] = torch.nan
    assert layer(x).isnan().all(1).tolist() == [t == 5 for t in range(len(x))]


@pytest.mark.parametrize("name", GATES)
def test_no_tokens_and_one(name):
    gate = make(name)
    topk_idx, topk_weights = gate(torch.zeros(0, D))
    assert topk_idx.shape[0] == topk_weights.shape[0] == 0
    topk_idx, topk_weights = gate(tokens(1))
    assert topk_idx.shape[0] == 1
    assert topk_weights.isfinite().all()


@pytest.mark.parametrize("name", [name for name in GATES if name not in WITHOUT_PARAMETERS])
def test_loss_reaches_the_gate_or_is_zero(name):
    gate, x = make(name).double(), tokens(dtype=torch.float64).requires_grad_()
    run(gate, x)
    loss = gate.get_loss()
    assert not gate.has_loss
    if name in (
        "naive",
        "swipe",
        "sigmoid",
        "biased_softmax",
        "sqrtsoftplus",
        "expert_choice",
        "sinkhorn",
        "quantile",
    ):
        assert loss.sum().item() == 0
        return
    (grad,) = torch.autograd.grad(loss, x)
    assert grad.abs().max() > 0 or name == "uniform", "an even load cannot be improved"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in GATES if name not in WITHOUT_PARAMETERS])
def test_token_that_is_not_a_number(name, training):
    """Its weights are NaN, or it has no expert; the others' are numbers."""
    gate, x = make(name).train(training), tokens()
    x[5, 2] = torch.nan
    topk_idx, topk_weights = run(gate, x)
    assert ((topk_idx >= -1) & (topk_idx < E)).all()
    assert topk_weights[5].isnan().any() or (topk_idx[5] == -1).all()
    others = torch.arange(len(x)) != 5
    assert topk_weights[others].isfinite().all()


def test_documentation_lists_every_gate():
    page = Path(__file__).parents[2].joinpath("docs/gates.md").read_text()
    table = page.split("| name and class |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(GATES)


def test_names():
    assert find_gate("sigmoid") is GATES["sigmoid"]
    with pytest.raises(ValueError, match="unknown gate 'router': choose one of naive, noisy, gshard"):
        find_gate("router")
    for name in GATES:
        assert isinstance(make(name), BaseGate)


@pytest.mark.parametrize("name", [name for name in GATES if name not in NEED_TWO + WITHOUT_PARAMETERS])
def test_too_many_choices(name):
    with pytest.raises(ValueError, match="top_k must be between 1 and the 8 experts, but got 9"):
        make(name, top_k=9)


@pytest.mark.parametrize("name", ["SoftmaxGate", "NormedGate", "UniformGate"])
def test_pickles_of_earlier_releases_find_their_gates(name):
    """They name the module that a gate was in."""
    assert pickle.loads(f"cfmoe_ext.gates.scored_gate\n{name}\n.".encode()) is getattr(gates, name)


def test_copies_of_a_gate_warn_for_themselves():
    gate = gates.NaiveGate(4, 4, 1)
    other = copy.deepcopy(gate)
    other.warned.add("calls")
    assert gate.warned == set()
