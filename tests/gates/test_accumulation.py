"""Losses over microbatches are those of the whole batch: values and gradients."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoETransformerMLP, balance, valid_tokens
from fmoe_ext.gates import (
    GShardGate,
    NoisyGate,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    WholeBatch,
    ZeroGate,
    all_forwards_first,
    total_loss,
)

D, E = 6, 4
SIZES = (5, 8, 3)
GATES = {
    "softmax": partial(SoftmaxGate, z_weight=0.1),
    "sequence": partial(SoftmaxGate, balance_loss="sequence", seq_len=1),
    "sigmoid": partial(SigmoidGate, balance_loss="global", z_weight=0.1),
    "switch": partial(SwitchGate, switch_eps=0.0, capacity=None),
    "noisy": NoisyGate,
}


class Model(nn.Module):
    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(D, D)
        self.moe = nn.ModuleList(FMoETransformerMLP(E, D, 5, gate=gate) for _ in range(2))
        self.use_reentrant = None
        self.double()

    def forward(self, x):
        x = self.before(x)
        for moe in self.moe:
            if self.use_reentrant is None:
                x = x + moe(x)
            else:
                x = x + checkpoint(moe, x, use_reentrant=self.use_reentrant)
        return x


def make(name):
    model = Model(GATES[name])
    return model.eval() if name == "noisy" else model  # without noise the two passes are one batch


def grads(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def whole(model, x):
    loss = model(x).square().sum() / len(x) + 0.5 * total_loss(model)
    loss.backward()
    return loss.detach()


def two_passes(model, parts, total):
    batch, losses, aux = WholeBatch(model), [], []
    with batch.first_pass():
        for part in parts:
            model(part)
    with batch.second_pass():
        for part in parts:
            out = model(part)
            aux.append(total_loss(model))
            loss = len(parts) * out.square().sum() / total + 0.5 * aux[-1]
            (loss / len(parts)).backward()
            losses.append(loss.detach() / len(parts))
    return sum(losses), torch.stack(aux).detach()


@pytest.mark.parametrize("use_reentrant", [None, False])
@pytest.mark.parametrize("name", GATES)
def test_two_passes(name, use_reentrant):
    ours = make(name)
    theirs = copy.deepcopy(ours)
    ours.use_reentrant = use_reentrant
    parts = torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES)
    our_loss, aux = two_passes(ours, parts, sum(SIZES))
    their_loss = whole(theirs, torch.cat(parts))
    torch.testing.assert_close(our_loss, their_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(aux, aux[:1].expand_as(aux), rtol=1e-12, atol=0)
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("use_reentrant", [None, False])
@pytest.mark.parametrize("name", GATES)
def test_all_forwards_first(name, use_reentrant):
    ours = make(name)
    theirs = copy.deepcopy(ours)
    ours.use_reentrant = use_reentrant
    parts = torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES)
    with all_forwards_first(ours):
        outs = torch.cat([ours(part) for part in parts])
        loss = outs.square().sum() / len(outs) + 0.5 * total_loss(ours)
        loss.backward()
    torch.testing.assert_close(loss.detach(), whole(theirs, torch.cat(parts)), rtol=1e-12, atol=0)
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_local_form_is_another_number():
    model = make("softmax")
    parts = torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES)
    local = []
    for part in parts:
        model(part)
        local.append(total_loss(model).detach())
    model(torch.cat(parts))
    assert abs(torch.stack(local).mean() - total_loss(model)) > 1e-3


def test_padded_microbatches():
    ours = make("softmax")
    theirs = copy.deepcopy(ours)
    parts = torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES)
    padded = torch.zeros(len(SIZES), max(SIZES), D, dtype=torch.float64)
    valid = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    padded[valid] = torch.cat(parts)
    batch = WholeBatch(ours)
    with batch.first_pass():
        for x, mask in zip(padded, valid, strict=True):
            with valid_tokens(mask):
                ours(x)
    with batch.second_pass():
        for x, mask in zip(padded, valid, strict=True):
            with valid_tokens(mask):
                out = ours(x)[mask]
            (out.square().sum() / sum(SIZES) + 0.5 * total_loss(ours) / len(SIZES)).backward()
    whole(theirs, torch.cat(parts))
    for a, b in zip(grads(ours), grads(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_first_pass_counts_nothing_and_restores_gates():
    model = make("sigmoid")
    monitor, ranks = balance.watch(model), [layer.gate.ranks for layer in model.moe]
    parts = torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES)
    two_passes(model, parts, sum(SIZES))
    for layer in monitor.collect()["layers"].values():
        assert sum(layer["tokens_per_expert"]) == 2 * sum(SIZES)
    assert int(model.moe[0].gate.pending_load.sum()) == 2 * sum(SIZES)
    assert [layer.gate.ranks for layer in model.moe] == ranks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_gate_copied_inside_a_block_is_outside_of_it(duplicate):
    model, x = FMoETransformerMLP(E, D, 5, gate="softmax").double(), torch.randn(4, D, dtype=torch.float64)
    model(x)
    alone = total_loss(model).detach()
    batch = WholeBatch(model)
    with batch.first_pass():
        model(torch.randn(3, D, dtype=torch.float64))
        copies = [duplicate(model)]
        model(x)
    with batch.second_pass():
        model(torch.randn(3, D, dtype=torch.float64))
        copies.append(duplicate(model))
        model(x)
    with all_forwards_first(model):
        model(torch.randn(3, D, dtype=torch.float64))
        copies.append(duplicate(model))
        model(x)
        assert not torch.allclose(total_loss(model), alone, rtol=1e-6, atol=0)
    for copied in copies:
        for _ in range(2):
            copied(x)
            assert torch.equal(total_loss(copied), alone)


def test_errors():
    model, x = make("softmax"), torch.randn(4, D, dtype=torch.float64)
    batch = WholeBatch(model)
    with pytest.raises(RuntimeError, match=r"first_pass\(\) has seen no forward"), batch.second_pass():
        pass
    with batch.first_pass():
        model(x)
    with pytest.raises(RuntimeError, match="counted 1 forwards, but"), batch.second_pass():
        model(x)
        model(x)
    with pytest.raises(ValueError, match="has no gate of fmoe_ext"):
        WholeBatch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="has no gate of fmoe_ext"):
        WholeBatch(ZeroGate(D, E, 1))


def test_every_gate_with_a_capacity_still_runs():
    model = Model(partial(GShardGate, random_routing=False))
    two_passes(model, torch.randn(sum(SIZES), D, dtype=torch.float64).split(SIZES), sum(SIZES))
