"""Steps of a Pipeline: gradients add up, running statistics move once, values have any strides."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmoe_ext.pipeline import Pipeline, init_groups, split


def sum_of_squares(out, target):
    return F.mse_loss(out, target, reduction="sum")


def batch(number):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def accumulated(schedule):
    """Three steps without zero_grad() -> the greatest error of a gradient, relative to the greatest gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    whole = copy.deepcopy(model)
    groups = init_groups(2)
    stages = split(model, 2, batch(0), by=[2, 1])
    pipeline = Pipeline(stages, sum_of_squares, schedule=schedule, chunks=2, groups=groups)
    replicas, mine = dist.get_world_size(groups.data), dist.get_rank(groups.data)
    for step in range(3):
        batches = [batch(replicas * step + number) for number in range(replicas)]
        pipeline.train_step(batches[mine], batches[mine].cos())
        x = torch.cat(batches)
        (sum_of_squares(whole(x), x.cos()) / len(x)).backward()
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    most = max(grad.abs().max() for grad in grads.values())
    return max(
        ((p.grad - grads[name]).abs().max() / most).item() for name, p in pipeline.module.named_parameters()
    )


@pytest.mark.parametrize(("schedule", "world_size"), [("gpipe", 2), ("zero_bubble", 2), ("1f1b", 4)])
def test_gradients_of_tied_parameters_add_up_over_steps(pool, schedule, world_size):
    assert max(pool.run(accumulated, schedule, world_size=world_size)) < 1e-12


def running_statistics(schedule, checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()
    stages = split(model, 2, batch(0), by=[2, 1])
    pipeline = Pipeline(stages, sum_of_squares, schedule=schedule, chunks=2, checkpoint=checkpoint)
    pipeline.train_step(batch(1), batch(2))
    return {name: value.tolist() for name, value in pipeline.module.named_buffers()}


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_repeated_forward_leaves_running_statistics_as_they_are(pool, schedule):
    """pytorch/pytorch#96136"""
    plain, checkpointed = (
        pool.run(running_statistics, schedule, checkpoint, world_size=2)[0] for checkpoint in (False, True)
    )
    assert plain["1.num_batches_tracked"] == 2
    assert checkpointed == plain


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def through_transposed_values(schedule, by):
    """A stage ends, or begins, in a layer that returns a view (pytorch/pytorch#114982)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Transposed(), nn.Linear(3, 3), Transposed()).double()
    whole = copy.deepcopy(model)
    x = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pipeline = Pipeline(split(model, 2, x, by=by), sum_of_squares, schedule=schedule, chunks=2)
    loss = pipeline.train_step(x, x.cos())
    expected = sum_of_squares(whole(x), x.cos()) / len(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(pipeline.evaluate(x, x.cos()), expected.detach(), rtol=1e-12, atol=0)
    grads = dict(whole.named_parameters())
    for name, p in pipeline.module.named_parameters():
        torch.testing.assert_close(p.grad, grads[name].grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("schedule", "by"), [("1f1b", [2, 2]), ("zero_bubble", [1, 3])])
def test_values_and_gradients_between_stages_need_not_be_contiguous(pool, schedule, by):
    pool.run(through_transposed_values, schedule, by, world_size=2)
