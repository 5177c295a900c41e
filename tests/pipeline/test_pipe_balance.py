import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.compat.fairscale import (
    Pipe,
    balance_by_size,
    balance_by_time,
    balance_cost,
    pop,
    skippable,
    stash,
)
from fmoe_ext.pipeline import split
from tests.pipeline.sleeping import Sleep, pass_time, sleeping


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_no_other_cut_has_a_smaller_greatest_part(costs, partitions):
    if partitions > len(costs):
        with pytest.raises(ValueError, match=f"between 1 and the {len(costs)} layers"):
            balance_cost(costs, partitions)
        return
    balance = balance_cost(costs, partitions)
    assert len(balance) == partitions and sum(balance) == len(costs) and min(balance) >= 1
    ends = itertools.accumulate(balance)
    greatest = max(sum(costs[end - n : end]) for n, end in zip(balance, ends, strict=True))
    cuts = itertools.combinations(range(1, len(costs)), partitions - 1)
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)
    assert greatest == best


def test_by_time():
    module = nn.Sequential(*(Sleep(ms / 1000) for ms in (30, 1, 1, 1, 30, 1)))
    with sleeping():
        assert balance_by_time(2, module, torch.ones(2), timeout=0.1) in ([1, 5], [2, 4], [3, 3], [4, 2])
        assert balance_by_time(3, module, torch.ones(2), timeout=0.1)[0] <= 4
    assert all(p.grad is None for p in module.parameters())


def test_by_time_refuses_a_module_with_gradients():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="a parameter already has a gradient"):
        balance_by_time(2, module, torch.ones(1, 2), timeout=0.01)


def test_by_size():
    module = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 1), nn.Linear(1, 1))
    assert balance_by_size(2, module, torch.ones(1, 4)) == [1, 3]
    wide = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    assert balance_by_size(2, wide, torch.ones(4096, 8), chunks=4) == [2, 2]


def test_by_size_takes_fairscales_mini_batch_and_weighs_a_microbatch():
    module = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 4), nn.Linear(4, 128))
    arguments = {"input": torch.ones(1024, 64), "device": "cpu"}
    assert balance_by_size(2, module, **arguments) == [1, 2]  # the first layer keeps 64 numbers a row
    assert balance_by_size(2, module, chunks=1024, **arguments) == [2, 1]  # the last one has most parameters


class AddOne(nn.Module):
    def forward(self, x):
        return x.add_(1)


@pytest.mark.parametrize(
    "cut",
    [
        lambda module, x: balance_by_time(2, module, x, timeout=0.01),
        lambda module, x: balance_by_size(2, module, x),
        lambda module, x: split(module, 2, x, by="time"),
    ],
    ids=["time", "size", "split"],
)
def test_layers_may_work_in_place_and_leave_the_sample(cut):
    for first in (nn.Linear(4, 4), AddOne()):  # a leaf of the graph, or the caller's tensor, for the next
        x = torch.ones(8, 4)
        assert len(cut(nn.Sequential(first, nn.ReLU(inplace=True), nn.Linear(4, 4)), x)) == 2
        assert torch.equal(x, torch.ones(8, 4))


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        skip = x * self.weight
        skip.register_hook(lambda grad: pass_time(0.01))
        yield stash("skip", skip)
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip


def test_backward_through_a_skip_counts_for_the_layer_that_stashed():
    module = nn.Sequential(Stash(), Sleep(0.003), Sleep(0.003), Pop())
    with sleeping():
        assert balance_by_time(2, module, torch.ones(2), timeout=0.03) == [1, 3]


def test_too_few_layers_are_refused_before_any_runs():
    for balance in (balance_by_time, balance_by_size):
        with pytest.raises(ValueError, match="between 1 and the 1 layers"):
            balance(2, nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 2))  # a run would be a RuntimeError


def test_experts_and_tuples():
    module = nn.Sequential(nn.Linear(4, 8), FMoETransformerMLP(4, 8, 16), nn.Linear(8, 2))
    balance = balance_by_time(2, module, torch.ones(8, 4), timeout=0.01)
    assert Pipe(module, balance)(torch.ones(8, 4)).shape == (8, 2)
    with pytest.raises(TypeError, match="sample must be a tensor"):
        balance_by_time(1, module, [1])
