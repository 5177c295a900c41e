"""Waits of an expert-parallel layer: two messages forward and two back, in chunks and under checkpointing too."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.ep.exchange import Transfer, wait, while_waiting
from fmoe_ext.gates import BaseGate

D = 8
CHECKPOINT = functools.partial(checkpoint, use_reentrant=False)


class Come:
    """A message that is here."""

    def wait(self):
        pass


def test_one_turn_for_what_is_under_way_at_once(monkeypatch):
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    turns = []
    with while_waiting(lambda: turns.append(1)):
        first, second = Transfer(Come()), Transfer(Come())
        wait([first], "the group")
        wait([second], "the group")
        assert len(turns) == 1
        wait([second, Transfer(Come())], "the group")
        assert len(turns) == 2
    wait([Transfer(Come())], "the group")
    assert len(turns) == 2


def counted(chunks, wrap):
    """Turns of a forward and of its backward, messages with tokens of either, gradients."""
    torch.manual_seed(1)
    layer = FMoETransformerMLP(2, D, 12, world_size=2, overlap_degree=chunks).double()
    torch.manual_seed(dist.get_rank())
    x = torch.randn(9, D, dtype=torch.float64, requires_grad=True)
    turns, messages, plain = [], [], dist.all_to_all_single

    def exchange(out, rows, *args, **options):
        messages.append(rows.shape[1:].numel() == D)
        return plain(out, rows, *args, **options)

    dist.all_to_all_single = exchange
    try:
        with while_waiting(lambda: turns.append(1)):
            y = wrap(layer, x)
            forward = len(turns), sum(messages)
            y.square().sum().backward()
    finally:
        dist.all_to_all_single = plain
    both = len(turns), sum(messages)
    return forward, both, [p.grad for p in (x, *layer.parameters())]


@pytest.mark.parametrize("chunks", [1, 2])
def test_turns_and_messages(pool, chunks):
    results = zip(
        pool.run(counted, chunks, _call, world_size=2),
        pool.run(counted, chunks, CHECKPOINT, world_size=2),
        strict=True,
    )
    for (forward, both, grads), (forward_again, both_again, grads_again) in results:
        assert forward == forward_again == (2, 2 * chunks)
        assert both == (4, 4 * chunks)
        # the repetition sends tokens again, and the results of all chunks but the last, which others wait for
        assert both_again == (4, 4 * chunks + 2 * chunks - 1)
        assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))


def _call(layer, x):
    return layer(x)


class ToFirst(BaseGate):
    """All tokens go to expert 0."""

    def __init__(self, d_model, num_expert, world_size, top_k):
        super().__init__(num_expert, world_size)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return torch.zeros(len(x), 1, dtype=torch.int64), self.scale.expand(len(x), 1)


class NothingForNothing(nn.Module):
    """An expert that keeps no tensors of no rows."""

    def __init__(self, d_model):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x).tanh() if len(x) else x


def without_rows():
    torch.manual_seed(1)
    layer = FMoE(1, D, world_size=2, top_k=1, gate=ToFirst, expert=NothingForNothing)
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    results = []
    for wrap in (_call, CHECKPOINT):
        x.grad = None
        layer.zero_grad()
        wrap(layer, wrap(layer, x)).square().sum().backward()
        results.append([p.grad for p in (x, *layer.parameters())])
    return results


def test_rank_without_rows_recomputes_as_others(pool):
    results = pool.run(without_rows, world_size=2, timeout=120)
    for plain, repeated in results:
        for a, b in zip(plain, repeated, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert results[0][0][0].abs().sum() > 0
