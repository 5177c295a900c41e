"""Parameters that DistributedGroupedDataParallel finds trained later than it was made, or not on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.distributed import DistributedGroupedDataParallel


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()


def batch(rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def train(model, x):
    model(x).square().mean().backward()


def expected():
    whole = two_layers()
    train(whole, torch.cat([batch(rank) for rank in range(dist.get_world_size())]))
    return [p.grad for p in whole.parameters()]


def unfrozen_later(auto_allreduce):
    """The first steps train the head alone (Lightning-AI/pytorch-lightning#20340)."""
    module = two_layers()
    module[0].requires_grad_(False)
    model = DistributedGroupedDataParallel(module, auto_allreduce=auto_allreduce)
    x = batch(dist.get_rank())
    train(model, x)
    model.allreduce_params()
    assert module[0].weight.grad is None
    model.zero_grad()
    module[0].requires_grad_(True)
    train(model, x)
    model.allreduce_params()
    for p, grad in zip(module.parameters(), expected(), strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("auto_allreduce", [False, True])
def test_layers_that_are_unfrozen_are_reduced(pool, auto_allreduce):
    pool.run(unfrozen_later, auto_allreduce, world_size=2)


def replaced_later(auto_allreduce):
    """A parameter that takes the place of another (pytorch/pytorch#12603)."""
    model = DistributedGroupedDataParallel(two_layers(), auto_allreduce=auto_allreduce)
    module = model.module
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())
    train(model, batch(dist.get_rank()))
    model.allreduce_params()
    for p, grad in zip(module.parameters(), expected(), strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("auto_allreduce", [False, True])
def test_parameters_that_are_replaced_are_reduced(pool, auto_allreduce):
    pool.run(replaced_later, auto_allreduce, world_size=2)


def unscaled_gradient():
    module = two_layers()
    module[0].weight.requires_grad_(False)
    module[0].weight.dp_comm = "none"  # as an expert: its gradient is scaled when it comes
    model = DistributedGroupedDataParallel(module)
    module[0].weight.requires_grad_(True)
    train(module, batch(0))
    with pytest.raises(RuntimeError, match=r"'0.weight' is trained since the last forward, and its gradient"):
        model.allreduce_params()


def test_gradient_that_came_unscaled_is_refused(pool):
    pool.run(unscaled_gradient, world_size=2)


def frozen_on_one_rank():
    module = two_layers()
    module[0].weight.requires_grad_(dist.get_rank() > 0)
    with pytest.raises(ValueError, match=r"must be the same on ranks .*frozen"):
        DistributedGroupedDataParallel(module)


def test_parameter_that_one_rank_freezes_is_refused_by_name(pool):
    pool.run(frozen_on_one_rank, world_size=2)
