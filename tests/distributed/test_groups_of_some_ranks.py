"""Process groups that we make where the ranks have made different numbers of groups before (pytorch/pytorch#189073)."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.ep.process_groups import new_group_of
from fmoe_ext.pipeline import Pipeline, split
from tests.distributed.layouts import ranks_per_node

SECONDS = 60.0  # for a collective; a wait under two names would take all of them


def sum_over(group):
    x = torch.ones(())
    dist.all_reduce(x, group=group)
    return x.item()


def groups_after_a_group_of_one_rank():
    """-> sums over the new groups of all ranks, and of the first two."""
    dist.new_group([0])  # the others have one group less from here on
    whole = new_group_of(range(dist.get_world_size()), dist.group.WORLD)
    again = new_group_of(range(dist.get_world_size()), dist.group.WORLD)
    two = new_group_of([0, 1], dist.group.WORLD)
    return sum_over(whole), sum_over(again), None if two is None else sum_over(two)


def test_groups_of_a_parent_and_of_a_part_of_it(pool):
    results = pool.run(groups_after_a_group_of_one_rank, world_size=3, timeout=SECONDS)
    assert results == [(3.0, 3.0, 2.0), (3.0, 3.0, 2.0), (3.0, 3.0, None)]


def groups_of_two_of_three_ranks():
    """-> sums over two new groups of a parent of the first two ranks, of which one has made a group more."""
    parent = dist.new_group([0, 1])
    dist.new_group([1])
    if dist.get_rank() == 2:
        return None
    first, second = (new_group_of([0, 1], parent) for _ in range(2))
    return sum_over(first), sum_over(second)


def test_groups_of_a_parent_that_some_ranks_are_not_in(pool):
    results = pool.run(groups_of_two_of_three_ranks, world_size=3, timeout=SECONDS)
    assert results == [(2.0, 2.0), (2.0, 2.0), None]


def replicas_after_a_group_of_one_rank():
    dist.new_group([1])
    model = DistributedGroupedDataParallel(nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    model.allreduce_params()
    return model.module.weight.grad.tolist()


def test_data_parallelism(pool):
    results = pool.run(replicas_after_a_group_of_one_rank, world_size=2, timeout=SECONDS)
    assert results == [[[1.5, 1.5, 1.5]]] * 2


def nodes_after_a_group_of_one_rank():
    dist.new_group([0])
    with ranks_per_node(1):
        torch.manual_seed(0)
        layers = [
            FMoETransformerMLP(1, 4, 8, world_size=2, moe_group=dist.group.WORLD, exchange=exchange)
            for exchange in ("choice", "node")
        ]
        layers[1].load_state_dict(layers[0].state_dict())
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        return (layers[0](x) - layers[1](x)).abs().max().item()


def test_exchange_over_nodes(pool):
    assert max(pool.run(nodes_after_a_group_of_one_rank, world_size=2, timeout=SECONDS)) < 1e-6


def tied_model():
    """Stages 0 and 2 share one layer, stages 1 and 2 another."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False) for _ in range(5)]
    layers[3].weight, layers[4].weight = layers[0].weight, layers[1].weight
    return nn.Sequential(*layers).double()


def sum_of_squares(out, target):
    return F.mse_loss(out, target, reduction="sum")


def parameters_tied_over_different_ranks():
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = tied_model()
    whole = copy.deepcopy(model)
    pipeline = Pipeline(split(model, 3, x, by=[1, 2, 2]), sum_of_squares, schedule="gpipe", chunks=3)
    loss = pipeline.train_step(x, x.cos())
    expected = sum_of_squares(whole(x), x.cos()) / len(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    grads = dict(whole.named_parameters(remove_duplicate=False))
    for name, p in pipeline.module.named_parameters():
        torch.testing.assert_close(p.grad, grads[name].grad, rtol=1e-12, atol=1e-14)
    return len(list(pipeline.parameters()))


def test_parameters_that_different_stages_share(pool):
    results = pool.run(parameters_tied_over_different_ranks, world_size=3, timeout=SECONDS)
    assert results == [1, 2, 2]
