"""Counts of calls, not times, that Pipe and Pipeline add to a step."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.pipeline import Pipeline, init_groups, split

D = 3


class Note(nn.Module):
    """Notes by which operator its input was made of the received tensor."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(D, D), seen

    def forward(self, x):
        if dist.get_rank() and torch.is_grad_enabled():
            self.seen.append(x.grad_fn.name() if x.grad_fn else "leaf")
        return self.linear(x)


def count_calls(schedule, chunks, rows):
    """Searches through modules and sums over ranks of the second step; nodes before the losses; noted inputs."""
    seen, nodes = [], []
    x = torch.randn(rows, D)
    stages = split(nn.Sequential(nn.Linear(D, D), Note(seen)), 2, x[:1], by=[1, 1])

    def squares(output, _):
        nodes.append(output.grad_fn.name())
        return output.square().sum()

    pipeline = Pipeline(stages, squares, schedule=schedule, chunks=chunks, groups=init_groups(2), count=len)
    pipeline.train_step(x, x)
    seen.clear(), nodes.clear()
    with (
        mock.patch.object(
            nn.Module, "named_modules", autospec=True, side_effect=nn.Module.named_modules
        ) as searches,
        mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as sums,
    ):
        pipeline.train_step(x, x)
    roots = [call.args[0] for call in searches.call_args_list if len(call.args) < 2]
    return len(roots), sums.call_count, nodes, seen


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_step_searches_modules_and_sums_as_often_with_more_microbatches(schedule, pool):
    few = pool.run(count_calls, schedule, 2, 8, world_size=2)
    many = pool.run(count_calls, schedule, 8, 8, world_size=2)
    assert [rank[0] for rank in few] == [rank[0] for rank in many]
    # the check of rows and the loss; groups of one rank sum nothing
    assert [rank[1] for rank in few + many] == [2, 2, 2, 2]


def test_microbatches_of_equal_rows_are_not_sliced(pool):
    """The backward of a slice fills and copies a gradient; rows that are all there are passed on as a view."""
    _, _, nodes, seen = pool.run(count_calls, "1f1b", 4, 8, world_size=2)[1]
    assert not any("Slice" in name for name in nodes + seen) and len(seen) == 4
    _, _, nodes, seen = pool.run(count_calls, "1f1b", 4, 7, world_size=2)[1]
    for names in (nodes, seen):
        assert ["Slice" in name for name in names] == [False] * 3 + [True]


def count_hooked_gradients(schedule):
    """Calls of a tensor hook that a forward pre-hook registers on a stage's input, after each of three steps."""
    calls, counts = [], []
    x = torch.randn(8, D)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    model[dist.get_rank()].register_forward_pre_hook(
        lambda module, inputs: (
            inputs[0].requires_grad_().register_hook(lambda grad: calls.append(None)) and None
        )
    )
    stages = split(model, 2, x[:1], by=[1, 1])
    options = {"schedule": schedule, "chunks": 4, "groups": init_groups(2), "count": len}
    pipeline = Pipeline(stages, lambda output, _: output.square().sum(), **options)
    for _ in range(3):
        pipeline.train_step(x, x)
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_hook_on_a_received_activation_is_called_once_a_microbatch(schedule, pool):
    assert pool.run(count_hooked_gradients, schedule, world_size=2)[1] == [4, 8, 12]
