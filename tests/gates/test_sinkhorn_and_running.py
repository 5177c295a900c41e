"""SinkhornGate, balance_loss="running" and random_logits, against loops in float64."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoE
from fmoe_ext.gates import SigmoidGate, SinkhornGate, SoftmaxGate, WholeBatch, balance_loss
from fmoe_ext.ops.balanced_shares import balanced_shares

D, E = 6, 8


def make(cls, top_k=2, **options):
    torch.manual_seed(0)
    return cls(D, E, 1, top_k, **options).double()


def tokens(num=32, seed=1):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def load_of(topk_idx):
    return topk_idx.flatten().bincount(minlength=E)


def test_shares_are_even():
    logits = 3 * torch.randn(64, E, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits[:, 0] += 5  # every token's favourite
    shares = balanced_shares(logits, make(SinkhornGate).ranks.gather)
    torch.testing.assert_close(shares.sum(0), torch.full((E,), 1 / E).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(shares.sum(1), torch.full((64,), 1 / 64).double(), rtol=1e-2, atol=0)
    ratio = (shares / logits.exp()).log()  # a factor of the row and a factor of the column
    ratio = ratio - ratio.mean(0) - ratio.mean(1, keepdim=True) + ratio.mean()
    assert ratio.abs().max() < 1e-10
    assert torch.equal(
        balanced_shares(1e3 * logits, make(SinkhornGate).ranks.gather).isfinite(), logits.isfinite()
    )


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_sinkhorn_gate_balances_in_training_only(top_k):
    gate, x = make(SinkhornGate, top_k), tokens(200)
    with torch.no_grad():
        gate.gate.bias[3] += 2
    topk_idx, weights, logits = gate(x, return_all_scores=True)
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    torch.testing.assert_close(weights, scores.gather(1, topk_idx), rtol=1e-12, atol=0)
    weights.sum().backward()
    assert gate.gate.weight.grad.abs().max() > 0 and gate.get_loss().item() == 0
    alone = gate.eval()(x)[0]
    assert torch.equal(alone, logits.topk(top_k).indices)
    assert load_of(alone).max() == load_of(alone)[3] > 1.5 * load_of(topk_idx).max()


def test_token_that_is_not_a_number_leaves_the_others_choices():
    gate, x = make(SinkhornGate), tokens(21)
    expected = gate(x[1:])[0]
    x[0] = torch.nan
    chosen = gate(x)[0][1:]
    assert (load_of(chosen) - load_of(expected)).abs().max() <= 2 and load_of(chosen).max() < len(chosen)


def test_sinkhorn_without_tokens_and_with_bad_options():
    assert make(SinkhornGate)(tokens(0))[0].shape == (0, 2)
    with pytest.raises(ValueError, match="SinkhornGate has no num_groups, but got num_groups=2"):
        make(SinkhornGate, num_groups=2)
    assert (
        "eval" in make(SinkhornGate).depends_on_batch and make(SinkhornGate).eval().depends_on_batch is None
    )


RUNNING = {"softmax": SoftmaxGate, "sigmoid": functools.partial(SigmoidGate, bias_update_speed=0.0)}


@pytest.mark.parametrize("name", RUNNING)
def test_running_loss_is_of_all_choices_of_the_step(name):
    gate = make(RUNNING[name], balance_loss="running", balance_weight=0.5)
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.0)
    for parts in ([tokens(12, 1), tokens(20, 2), tokens(5, 3)], [tokens(9, 4)]):
        chosen = torch.zeros(E, dtype=torch.float64)
        for x in parts:
            topk_idx, _, logits = gate(x, return_all_scores=True)
            chosen += load_of(topk_idx)
            mean_score = gate.probabilities(logits).mean(0)
            expected = 0.5 * E * (chosen / chosen.sum() * mean_score).sum()
            torch.testing.assert_close(gate.get_loss(), expected, rtol=1e-12, atol=0)
            gate.eval()(x), gate.train()
        optimizer.step()
        assert gate.running_load.sum() == 0
    assert "running_load" not in gate.state_dict()
    gate(tokens())
    twin = copy.deepcopy(gate)
    torch.optim.SGD(twin.parameters(), lr=0.0).step()
    assert twin.running_load.sum() == 0 and gate.running_load.sum() == 64
    gate.reset_running_load()
    assert gate.running_load.sum() == 0


def test_repeated_forward_outside_of_a_layer_is_refused():
    gate = make(SoftmaxGate, balance_loss="running")
    _, weights = checkpoint(gate, tokens().requires_grad_(), use_reentrant=False)
    with pytest.raises(RuntimeError, match="repeats SoftmaxGate outside of an FMoE layer"):
        weights.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_repeated_forward_counts_once_with_first_loss(reentrant):
    torch.manual_seed(0)
    gate = functools.partial(SoftmaxGate, balance_loss="running")
    layer = FMoE(E, D, top_k=2, gate=gate, expert=lambda d: nn.Linear(d, d)).double()
    parts, losses = [tokens(12, 1).requires_grad_(), tokens(20, 2).requires_grad_()], []

    def block(x):
        out = layer(x)
        losses.append(layer.gate.get_loss())
        return out, losses[-1]

    def grads(run):
        outs = [run(x) for x in parts]
        for out, loss in reversed(outs):
            (out.square().sum() + loss).backward()
        found = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        load = layer.gate.running_load.clone()
        layer.gate.reset_running_load()
        return found, load

    plain, load = grads(block)
    again, load_again = grads(functools.partial(checkpoint, block, use_reentrant=reentrant))
    assert torch.equal(load, load_again) and load.sum() == 64
    for a, b in zip(again, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert losses[2:4] == losses[:2]


def test_both_passes_over_the_whole_batch_give_its_loss():
    gate, parts = make(SoftmaxGate, balance_loss="running"), [tokens(12, 1), tokens(20, 2)]
    whole = WholeBatch(gate)
    with whole.first_pass():
        for x in parts:
            gate(x)
    with whole.second_pass():
        for x in parts:
            gate(x)
            loss = gate.get_loss()
    topk_idx, _, logits = gate(torch.cat(parts), return_all_scores=True)
    torch.testing.assert_close(loss, balance_loss(gate.probabilities(logits), topk_idx), rtol=1e-12, atol=0)


def test_random_logits_choose_and_pass_the_gradient_on():
    gate, x = make(SoftmaxGate, random_logits=True, normalize=False, z_weight=0.1), tokens(400)
    torch.manual_seed(5)
    topk_idx, weights, logits = gate(x, return_all_scores=True)
    torch.manual_seed(5)
    drawn = torch.randn_like(logits).requires_grad_()
    assert torch.equal(logits, drawn) and torch.equal(topk_idx, drawn.topk(2).indices)
    (weights.square().sum() + gate.get_loss()).backward()
    expected = drawn.softmax(-1).gather(1, topk_idx).square().sum() + 0.1 * drawn.logsumexp(1).square().mean()
    expected = expected + balance_loss(drawn.softmax(-1), topk_idx)
    (grad,) = torch.autograd.grad(expected, drawn)
    torch.testing.assert_close(gate.gate.weight.grad, grad.T @ x, rtol=1e-12, atol=1e-14)
    assert load_of(topk_idx).max() < 1.4 * 100
    assert "at random" in gate.depends_on_batch
