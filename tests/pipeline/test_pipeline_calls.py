"""Counts of calls, not times, that Pipe and Pipeline add to a step."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.pipeline import Pipeline, init_groups, split

D = 3


class Note(nn.Module):
    """Notes if its input is a leaf, the received tensor itself."""

    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(D, D), seen

    def forward(self, x):
        if dist.get_rank() and torch.is_grad_enabled():
            self.seen.append(x.is_leaf)
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
    assert [rank[1] for rank in few + many] == [1, 1, 1, 1]  # the loss; groups of one rank sum nothing


def test_microbatches_of_equal_rows_are_not_sliced(pool):
    """The backward of a slice fills and copies a gradient; rows that are all there are passed on as they are."""
    _, _, nodes, seen = pool.run(count_calls, "1f1b", 4, 8, world_size=2)[1]
    assert not any("Slice" in name for name in nodes) and seen == [True] * 4
    _, _, nodes, seen = pool.run(count_calls, "1f1b", 4, 7, world_size=2)[1]
    assert [("Slice" in name, leaf) for name, leaf in zip(nodes, seen, strict=True)] == [
        (False, True)
    ] * 3 + [(True, False)]
