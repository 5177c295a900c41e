"""Steps of a Pipeline: gradients add up, running statistics move once, values have any strides."""

import copy
import unittest.mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fmoe_ext
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


def tied_pipeline(schedule, frozen=False, **options):
    """Two Linear of one weight, in the first and the last stage."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Tanh(), nn.Linear(3, 3)).double()
    model[3].weight = model[0].weight
    model[0].weight.requires_grad_(not frozen)
    by = [1, 1, 1, 1] if schedule in ("zero_bubble_v", "dualpipe_v") else [2, 2]
    stages = split(model, len(by), batch(0), by=by)
    return Pipeline(stages, sum_of_squares, schedule=schedule, chunks=4, groups=init_groups(2), **options)


def refusal_of_fsdp(schedule):
    try:
        tied_pipeline(schedule, data_parallel="fsdp")
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_fsdp_refuses_parameters_that_stages_share(pool, schedule):
    """In a V one rank has both stages, and the second one has neither."""
    for text in pool.run(refusal_of_fsdp, schedule, world_size=4):
        assert text.startswith(
            'data_parallel="fsdp" cuts parameters that stages share into shards of their own'
        )


def steps_that_raise():
    pipeline = tied_pipeline("1f1b")
    pipeline.train_step(batch(1), batch(2))
    before = {name: p.grad.clone() for name, p in pipeline.module.named_parameters()}
    with pytest.raises(ValueError, match="the number of rows of a batch must be the same on ranks"):
        x = torch.randn(8 + 4 * dist.get_rank(), 3, dtype=torch.float64)
        pipeline.train_step(x, x)
    torch.testing.assert_close(
        {n: p.grad for n, p in pipeline.module.named_parameters()}, before, rtol=0, atol=0
    )
    pipeline.train_step(batch(1), batch(2))  # torch's schedule for four rows is there
    with (
        unittest.mock.patch.object(pipeline._schedule, "step", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pipeline.train_step(batch(1), batch(2))
    twice = {name: 2 * grad for name, grad in before.items()}
    torch.testing.assert_close(
        {n: p.grad for n, p in pipeline.module.named_parameters()}, twice, rtol=1e-12, atol=0
    )


def test_step_that_raises_leaves_gradients_of_tied_parameters(pool):
    pool.run(steps_that_raise, world_size=2)


def step_of_frozen():
    pipeline = tied_pipeline("1f1b", frozen=True)
    before = {name: p.detach().clone() for name, p in pipeline.module.named_parameters()}
    pipeline.train_step(batch(1), batch(2))
    torch.optim.AdamW(pipeline.parameters(), lr=0.1, weight_decay=0.5).step()
    return {name: torch.equal(p, before[name]) for name, p in pipeline.module.named_parameters()}


def test_frozen_tied_parameter_is_not_decayed(pool):
    same = pool.run(step_of_frozen, world_size=2)
    assert same == [{"0.weight": True, "0.bias": False}, {"3.weight": True, "3.bias": False}]


def gate_pipeline(loss_fn):
    torch.manual_seed(0)
    moe = fmoe_ext.FMoETransformerMLP(4, 8, 12, gate=fmoe_ext.SoftmaxGate).double()
    stages = split(nn.Sequential(moe), 1, torch.randn(4, 8).double(), by=[1])
    return Pipeline(stages, loss_fn, schedule="gpipe", chunks=2, balance_weight=0.3)


def evaluate_between_steps():
    fails = False

    def loss_fn(output, target):
        if fails:
            raise RuntimeError("no loss")
        return sum_of_squares(output, target)

    pipeline = gate_pipeline(loss_fn)
    x = torch.randn(4, 8, dtype=torch.float64)
    pipeline.train_step(x, x)
    expected = pipeline.balance_loss.item()
    assert expected > 0
    pipeline.evaluate(x, x)
    assert pipeline.balance_loss.item() == expected
    fails = True
    with pytest.raises(RuntimeError, match="no loss"):
        pipeline.evaluate(x, x)
    fails = False
    pipeline.train_step(x, x)
    assert pipeline.balance_loss.item() == expected


def test_evaluation_leaves_the_balance_loss(pool):
    """Also one that raises: its gates' losses are not those of the next step."""
    pool.run(evaluate_between_steps, world_size=1)


def unequal_batches():
    pipeline = tied_pipeline("1f1b")

    def rows(number):
        x = torch.linspace(-1, 1, 3 * number, dtype=torch.float64).view(number, 3)
        return x, x.cos()

    expected = pipeline.train_step(*rows(8))
    for mine in ((7, 8), (12, 8)):
        for call in (pipeline.train_step, pipeline.evaluate):
            with pytest.raises(
                ValueError, match=r"the number of rows of a batch must be the same on ranks \[0, 1\]"
            ):
                call(*rows(mine[dist.get_rank()]))
    assert pipeline.train_step(*rows(8)) == expected


def test_unequal_batches_of_one_pipeline_are_refused(pool):
    """After a step, also where the greatest microbatches are equal: 7 and 8 rows in 4 chunks."""
    pool.run(unequal_batches, world_size=2)
