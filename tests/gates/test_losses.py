"""Losses against loops written from the papers' formulas, in float64."""

import functools

import pytest
import torch

from fmoe_ext.gates import (
    DCGate,
    FasterGate,
    GShardGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    UniformGate,
    balance_loss,
    sequence_balance_loss,
    z_loss,
)
from fmoe_ext.gates.losses import cv_squared
from fmoe_ext.testing import assert_close

T, E, K = 24, 5, 2


def batch(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=generator, dtype=dtype)
    return logits, logits.topk(K, dim=1).indices


def balance_loss_by_loops(scores, topk_idx):
    num_tokens, num_experts = scores.shape
    total = 0.0
    for e in range(num_experts):
        f = sum(int(topk_idx[t, k] == e) for t in range(num_tokens) for k in range(topk_idx.shape[1]))
        p = sum(scores[t, e] for t in range(num_tokens)) / num_tokens
        total = total + f / (num_tokens * topk_idx.shape[1]) * p
    return num_experts * total


def test_balance_loss_is_the_switch_formula():
    logits, topk_idx = batch()
    expected = balance_loss_by_loops(logits.softmax(-1), topk_idx)
    torch.testing.assert_close(balance_loss(logits.softmax(-1), topk_idx), expected, rtol=1e-13, atol=0)


def test_balance_loss_of_an_even_and_of_a_collapsed_load():
    even = torch.arange(T)[:, None] % E
    uniform = torch.full((T - T % E, E), 1 / E, dtype=torch.float64)
    assert balance_loss(uniform, even[: len(uniform)]).item() == pytest.approx(1)
    collapsed = torch.nn.functional.one_hot(torch.zeros(T, dtype=torch.int64), E).double()
    assert balance_loss(collapsed, torch.zeros(T, 1, dtype=torch.int64)).item() == pytest.approx(E)


def test_sequence_loss_is_the_mean_of_the_sequences():
    logits, topk_idx = batch()
    scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    seq_len = 8
    expected = sum(
        balance_loss_by_loops(scores[b : b + seq_len], topk_idx[b : b + seq_len])
        for b in range(0, T, seq_len)
    ) / (T // seq_len)
    torch.testing.assert_close(sequence_balance_loss(scores, topk_idx, seq_len), expected, rtol=1e-13, atol=0)
    whole = sequence_balance_loss(scores, topk_idx, T)
    torch.testing.assert_close(whole, balance_loss(scores, topk_idx), rtol=1e-13, atol=0)


def test_dropped_choices_count_for_nobody():
    logits, topk_idx = batch()
    dropped = topk_idx.clone()
    dropped[:, 1] = -1
    scores = logits.softmax(-1)
    expected = balance_loss_by_loops(scores, topk_idx[:, :1])
    torch.testing.assert_close(balance_loss(scores, dropped), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(sequence_balance_loss(scores, dropped, T), expected, rtol=1e-13, atol=0)


def test_z_loss():
    logits, _ = batch()
    expected = sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / T
    torch.testing.assert_close(z_loss(logits), expected, rtol=1e-13, atol=0)


def test_cv_squared():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert cv_squared(x).item() == pytest.approx(7.0 / 9.0)  # variance ((-2)^2 + (-1)^2 + 3^2) / 2, mean 3
    assert cv_squared(x[:1]).item() == 0


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, idx: balance_loss(logits.softmax(-1), idx),
        lambda logits, idx: sequence_balance_loss(logits.softmax(-1), idx, 6),
        lambda logits, idx: z_loss(logits),
        lambda logits, idx: cv_squared(logits.softmax(-1).sum(0)),
    ],
    ids=["balance", "sequence", "z", "cv"],
)
def test_gradients(loss):
    logits, topk_idx = batch(seed=1)
    assert torch.autograd.gradcheck(lambda x: loss(x, topk_idx), logits.requires_grad_())


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(SwitchGate, topk=2, capacity=(0.7, 0.7)),
        functools.partial(SwitchGate, topk=2, capacity=(0.7, 0.7), fastmoe_loss=True),
        GShardGate,
        DCGate,
        functools.partial(FasterGate, node_rank=0),
        functools.partial(SoftmaxGate, z_weight=0.3),
        functools.partial(SigmoidGate, balance_loss="global"),
        functools.partial(SigmoidGate, balance_loss="sequence", seq_len=6),
        UniformGate,
    ],
    ids=[
        "switch",
        "switch of FastMoE",
        "gshard",
        "dc",
        "faster",
        "softmax",
        "sigmoid",
        "sequence",
        "uniform",
    ],
)
def test_gradients_of_the_gates(make):
    torch.manual_seed(0)
    gate = make(3, E, 1).double().eval()

    def loss(x, weight):
        torch.func.functional_call(gate, {"gate.weight": weight}, x)
        return gate.get_loss()

    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    weight = gate.gate.weight.detach().clone().requires_grad_()
    assert loss(x, weight).item() > 0
    assert torch.autograd.gradcheck(loss, (x, weight))


@pytest.mark.parametrize("name", ["balance", "sequence", "z"])
def test_float32(name):
    logits, topk_idx = batch(seed=2)

    def plain(x):
        if name == "z":
            return x.logsumexp(1).square().mean()
        scores, parts = x.softmax(-1), 1 if name == "balance" else 3
        one_hot = torch.nn.functional.one_hot(topk_idx, E).sum(1).to(x.dtype)
        pairs = zip(one_hot.chunk(parts), scores.chunk(parts), strict=True)
        return sum(E * (f.mean(0) / K * p.mean(0)).sum() for f, p in pairs) / parts

    def ours(x):
        if name == "z":
            return z_loss(x)
        scores = x.softmax(-1)
        if name == "balance":
            return balance_loss(scores, topk_idx)
        return sequence_balance_loss(scores, topk_idx, T // 3)

    assert_close(ours(logits.float()), plain(logits), plain(logits.float()), name)


def test_no_tokens():
    logits = torch.zeros(0, E, requires_grad=True)
    idx = torch.zeros(0, K, dtype=torch.int64)
    for loss in (
        balance_loss(logits, idx),
        sequence_balance_loss(logits, idx, 4),
        z_loss(logits),
    ):
        assert loss.item() == 0
        loss.backward()


def test_seq_len_must_divide():
    logits, topk_idx = batch()
    with pytest.raises(ValueError, match="seq_len must divide the 24 tokens of the batch, but is 7"):
        sequence_balance_loss(logits, topk_idx, 7)
