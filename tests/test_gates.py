import copy
import math

import pytest
import torch
import torch.nn.functional as F

from fmoe_ext import BaseGate, GShardGate, NaiveGate, SwitchGate
from fmoe_ext.gates import OneRank
from fmoe_ext.testing import assert_close

T, D, E = 40, 8, 6


def make_gate(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    gate = kind(D, options.pop("num_expert", E), options.pop("world_size", 1), **options)
    torch.nn.init.normal_(gate.gate.weight)
    if gate.gate.bias is not None:
        torch.nn.init.normal_(gate.gate.bias)
    return gate.to(dtype)


def make_input(dtype=torch.float64, num_tokens=T):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, D, generator=generator, dtype=torch.float64).to(dtype)


def logits_of(gate, x):
    return F.linear(x, gate.gate.weight, gate.gate.bias)


def keep_first(chosen, capacity):
    """chosen [T, K] with -1 for what does not fit, first choices before second ones, by a loop."""
    kept, used = chosen.clone(), [0] * E
    for k in range(chosen.shape[1]):
        for t in range(chosen.shape[0]):
            e = int(chosen[t, k])
            used[e] += 1
            if used[e] > capacity:
                kept[t, k] = -1
    return kept


class TwoEqualRanks(OneRank):
    """As if another rank had the same tokens; it comes second, so that capacity serves this one first."""

    def num_tokens(self, num_local_tokens):
        return 2 * num_local_tokens

    def sum(self, x):
        return 2 * x


def test_base_gate_keeps_a_loss():
    gate = BaseGate(3, 2)
    assert gate.tot_expert == 6 and not gate.has_loss and gate.get_loss() is None
    loss = torch.tensor(2.0)
    gate.set_loss(loss)
    assert gate.has_loss and gate.get_loss(clear=False) is loss
    assert gate.get_loss() is loss and not gate.has_loss
    with pytest.raises(NotImplementedError, match="BaseGate must define forward"):
        gate(torch.randn(2, 3))
    with pytest.raises(ValueError, match="at least 1, but got 0 and 1"):
        BaseGate(0, 1)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_naive_gate(normalize, bias):
    gate = make_gate(NaiveGate, num_expert=3, world_size=2, top_k=3, gate_bias=bias, normalize=normalize)
    x = make_input().requires_grad_()
    topk_idx, topk_weights, scores = gate(x, return_all_scores=True)
    logits = logits_of(gate, x)
    values, truth_idx = logits.topk(3)
    truth = values.softmax(-1) if normalize else logits.softmax(-1).gather(1, truth_idx)
    assert topk_idx.dtype == torch.int64 and torch.equal(topk_idx, truth_idx)
    torch.testing.assert_close(topk_weights, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores, logits, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(truth)
    params = [x, *gate.parameters()]
    ours, theirs = (torch.autograd.grad(o, params, grad) for o in (topk_weights, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert gate.has_loss and gate.get_loss().item() == 0


def test_naive_gate_top_1_learns_only_without_normalising():
    x = make_input()
    gate = make_gate(NaiveGate, top_k=1)
    _, weights = gate(x)
    assert torch.equal(weights, torch.ones_like(weights))
    assert torch.autograd.grad(weights.sum(), gate.gate.weight)[0].abs().max() < 1e-12
    gate = make_gate(NaiveGate, top_k=1, normalize=False)
    _, weights = gate(x)
    assert torch.autograd.grad(weights.sum(), gate.gate.weight)[0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", [NaiveGate, SwitchGate, GShardGate])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_float32_for_half_precision(kind, dtype):
    gate = make_gate(kind, dtype).eval()
    x = make_input(dtype)
    topk_idx, topk_weights, scores = gate(x, return_all_scores=True)
    wide_idx, wide_weights, wide_scores = copy.deepcopy(gate).float()(x.float(), return_all_scores=True)
    assert topk_weights.dtype == torch.float32
    assert torch.equal(topk_idx, wide_idx)
    assert torch.equal(topk_weights, wide_weights) and torch.equal(scores, wide_scores)
    with torch.autocast("cpu", dtype):
        auto_idx, auto_weights = gate(x)
    assert torch.equal(auto_idx, wide_idx) and torch.equal(auto_weights, wide_weights)
    topk_weights.sum().backward()
    assert gate.gate.weight.grad.dtype == dtype and gate.get_loss().dtype == torch.float32


@pytest.mark.parametrize("topk", [1, 2])
def test_switch_gate(topk):
    gate = make_gate(SwitchGate, topk=topk, capacity=(0.75, 1.1)).eval()
    x = make_input()
    topk_idx, topk_weights = gate(x)
    probs = logits_of(gate, x).softmax(-1)
    values, chosen = probs.topk(topk)
    capacity = math.ceil(1.1 * T * topk / E)
    assert torch.equal(topk_idx, keep_first(chosen, capacity)) and (topk_idx < 0).any()
    torch.testing.assert_close(topk_weights, values, rtol=1e-12, atol=1e-12)
    f = torch.stack([(chosen == e).double().sum() / chosen.numel() for e in range(E)])
    truth = E * (f * probs.mean(0)).sum()
    loss = gate.get_loss()
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(o, gate.gate.weight)[0] for o in (loss, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    gate.train()
    gate.switch_eps = 0
    assert torch.equal(gate(x)[0], keep_first(chosen, math.ceil(0.75 * T * topk / E)))


def test_switch_gate_jitter_is_multiplicative_and_only_in_training():
    gate = make_gate(SwitchGate, switch_eps=0.3, capacity=None)
    x = make_input()
    torch.manual_seed(7)
    logits = gate(x, return_all_scores=True)[2]
    torch.manual_seed(7)
    noise = 0.7 + 0.6 * torch.rand_like(x)
    torch.testing.assert_close(logits, logits_of(gate, x * noise), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(logits, logits_of(gate, x))
    gate.eval()
    torch.testing.assert_close(gate(x, return_all_scores=True)[2], logits_of(gate, x), rtol=1e-12, atol=1e-12)
    assert (gate(x)[0] >= 0).all()  # capacity=None


def test_switch_gate_as_fastmoe():
    gate = make_gate(SwitchGate, switch_eps=0.3, capacity=(0.5, 0.5), additive_noise=True, fastmoe_loss=True)
    x = make_input()
    torch.manual_seed(7)
    topk_idx, _, logits = gate(x, return_all_scores=True)
    torch.manual_seed(7)
    noise = 0.7 + 0.6 * torch.rand(T, E, dtype=x.dtype)
    torch.testing.assert_close(logits, logits_of(gate, x) + noise, rtol=1e-12, atol=1e-12)
    kept = topk_idx[topk_idx >= 0]
    assert 0 < kept.numel() < T
    f = torch.bincount(kept, minlength=E).double() / kept.numel()
    p = logits.softmax(-1).sum(0) / kept.numel()
    torch.testing.assert_close(gate.get_loss(), (f * p).sum() * E, rtol=1e-12, atol=0)


def test_gshard_gate():
    gate = make_gate(GShardGate, capacity=(0.5, 0.75)).eval()
    x = make_input()
    topk_idx, topk_weights = gate(x)
    logits = logits_of(gate, x)
    values, chosen = logits.topk(2)
    assert torch.equal(topk_idx, keep_first(chosen, math.ceil(0.75 * T) * 2 // E)) and (topk_idx < 0).any()
    torch.testing.assert_close(topk_weights, values.softmax(-1), rtol=1e-12, atol=1e-12)
    c = torch.stack([(chosen[:, 0] == e).double().mean() for e in range(E)])
    truth = (c * logits.softmax(-1).mean(0)).mean() * E**2
    loss = gate.get_loss()
    torch.testing.assert_close(loss, truth, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(o, gate.gate.weight)[0] for o in (loss, truth))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    gate.train()
    gate.random_routing = False
    assert torch.equal(gate(x)[0], keep_first(chosen, math.ceil(0.5 * T) * 2 // E))
    # one token of 8 experts has a capacity of 0, as in FastMoE
    assert GShardGate(D, 8, 1).double().eval()(x[:1])[0].tolist() == [[-1, -1]]


def test_gshard_gate_drops_second_choices_at_random():
    gate = make_gate(GShardGate, capacity=(E, E))
    x = make_input(num_tokens=4000)
    torch.manual_seed(7)
    topk_idx, topk_weights = gate(x)
    torch.manual_seed(7)
    keep = 2 * topk_weights[:, 1] >= torch.rand(4000, dtype=x.dtype)
    chosen = gate.eval()(x)[0]
    assert torch.equal(topk_idx[:, 0], chosen[:, 0])
    assert torch.equal(topk_idx[:, 1], torch.where(keep, chosen[:, 1], -1))
    expected = (2 * topk_weights[:, 1]).clamp(max=1).mean()
    assert abs(keep.double().mean() - expected) < 0.03


@pytest.mark.parametrize("kind", [SwitchGate, GShardGate])
def test_several_ranks(kind):
    """A rank that asks for all tokens gets the same loss as alone, and the capacity of twice the tokens."""
    alone, together = (make_gate(kind, capacity=(0.5, 0.5)).eval() for _ in range(2))
    together.ranks = TwoEqualRanks()
    x = make_input()
    few, more = alone(x)[0], together(x)[0]
    chosen = logits_of(alone, x).topk(alone.top_k)[1]
    for topk_idx, num_tokens in ((few, T), (more, 2 * T)):
        if kind is SwitchGate:
            capacity = math.ceil(0.5 * num_tokens / E)
        else:
            capacity = math.ceil(0.5 * num_tokens) * 2 // E
        assert torch.equal(topk_idx, keep_first(chosen, capacity))
    torch.testing.assert_close(alone.get_loss(), together.get_loss(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", [NaiveGate, SwitchGate, GShardGate])
def test_no_tokens(kind):
    gate = make_gate(kind)
    topk_idx, topk_weights = gate(make_input(num_tokens=0))
    assert topk_idx.shape == topk_weights.shape == (0, gate.top_k)
    assert gate.get_loss().item() == 0


@pytest.mark.parametrize("kind", [SwitchGate, GShardGate])
def test_loss_under_compile(kind):
    gate = make_gate(kind).eval()
    x = make_input()
    gate(x)
    loss = gate.get_loss()
    torch.compile(gate, fullgraph=True, backend="aot_eager")(x)
    compiled_loss = gate.get_loss()
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-12, atol=0)
    grads = [torch.autograd.grad(value, gate.gate.weight)[0] for value in (compiled_loss, loss)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_balanced_loss_is_one():
    for kind in (SwitchGate, GShardGate):
        gate = make_gate(kind, capacity=(E, E)).eval()
        with torch.no_grad():
            gate.gate.weight.zero_()
            gate.gate.bias.zero_()
            gate.gate.weight[:, :E] = 1e-9 * torch.eye(E)
        gate(torch.eye(D, dtype=torch.float64)[torch.arange(7 * E) % E])
        assert gate.get_loss().item() == pytest.approx(1, rel=1e-6)


def test_weights_in_float32():
    gate, x = make_gate(NaiveGate, torch.float32), make_input(torch.float32)
    topk_idx, topk_weights = gate(x)
    wide = copy.deepcopy(gate).double()
    truth = logits_of(wide, x.double()).gather(1, topk_idx).softmax(-1)
    assert_close(topk_weights, truth, logits_of(gate, x).gather(1, topk_idx).softmax(-1))


def test_rejects():
    with pytest.raises(ValueError, match="top_k must be between 1 and the 6 experts, but got 7"):
        NaiveGate(D, 3, 2, top_k=7)
    with pytest.raises(ValueError, match="top_k must be between 1 and the 6 experts, but got 0"):
        SwitchGate(D, 3, 2, topk=0)
    with pytest.raises(ValueError, match="topk must be 2, but got 1"):
        GShardGate(D, E, 1, topk=1)
    with pytest.raises(ValueError, match=r"two positive factors \(training, evaluation\), but got \(0, 1\)"):
        SwitchGate(D, E, 1, capacity=(0, 1))
    with pytest.raises(ValueError, match=r"but got \(1,\)"):
        GShardGate(D, E, 1, capacity=(1,))
    gate = make_gate(NaiveGate)
    with pytest.raises(TypeError, match=r"NaiveGate needs a tensor .* but got dict"):
        gate({"x": make_input()})
    with pytest.raises(ValueError, match=r"inp must have shape \[T, d_model=8\], but got \[3, 7\]"):
        gate(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"but got \[2, 3, 8\]"):
        gate(torch.randn(2, 3, 8))
