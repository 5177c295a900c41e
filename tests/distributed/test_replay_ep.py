"""RoutingReplay with experts on two ranks: choices, outputs and gradients of one process, for all tokens or some."""

import functools

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import RoutingReplay
from fmoe_ext.balance import Choices
from fmoe_ext.distributed import DistributedGroupedDataParallel, init_groups
from fmoe_ext.gates import SigmoidGate, SoftmaxGate
from tests.distributed import layouts

ROWS = [5, 8]
FIRST, END = [0, 5], [5, 13]
GATES = {
    "softmax": SoftmaxGate,
    "softmax with losses and drops": functools.partial(SoftmaxGate, capacity_factor=0.8, z_weight=0.1),
    "sigmoid": SigmoidGate,
}


def models_of(gate):
    """(one process, this rank's part of it under data parallelism, its groups)."""
    groups = init_groups(ep=2)
    alone = layouts.fill(layouts.Model(layouts.E, gate=gate), torch.float64)
    ours = layouts.local_model(groups, torch.float64, gate=gate)
    return alone, DistributedGroupedDataParallel(ours, **groups.data_parallel_kwargs()), groups


def whole_batch(step):
    parts = [layouts.batch(i, step, n, torch.float64) for i, n in enumerate(ROWS)]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def elsewhere(with_gaps):
    """Choices [13, 2] that no gate made, a permutation a token; with_gaps: every third token chooses for itself."""
    generator = torch.Generator().manual_seed(7)
    chosen = torch.rand(sum(ROWS), layouts.E, generator=generator).argsort(1)[:, : layouts.K]
    chosen[::3] = -2 if with_gaps else chosen[::3]
    return chosen


def assert_equal_step(alone, ours, replay_alone, replay, groups):
    """Output, loss and every gradient of a step that plays."""
    rank = dist.get_rank()
    (x, y), mine = whole_batch(1), slice(FIRST[rank], END[rank])
    with replay_alone.play():
        expected = alone(x)
    loss = (expected - y).square().sum() / len(x) + 0.5 * alone.gate_loss()
    loss.backward()
    with replay.play():
        output = ours(x[mine])
    torch.testing.assert_close(output, expected[mine], rtol=1e-12, atol=1e-14)
    own = (output - y[mine]).square().sum() / len(x) * 2 + 0.5 * ours.module.gate_loss()
    own.backward()
    ours.allreduce_params()
    total = own.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / 2, loss.detach(), rtol=1e-12, atol=0)
    grads = layouts.grads_of(ours.module)
    for name, full in layouts.grads_of(alone).items():
        name, part = layouts.local_part(name, full, rank, 2, "fused")
        if name is not None:
            torch.testing.assert_close(grads[name], part, rtol=1e-12, atol=1e-14)
            assert part.abs().max() > 0 or "gate" in name or "bias" in name
    assert grads["moe.0.gate.gate.weight"].abs().max() > 0


def played_from_elsewhere(gate, with_gaps):
    alone, ours, groups = models_of(gate)
    rank, chosen = dist.get_rank(), elsewhere(with_gaps)
    replay_alone, replay = RoutingReplay(alone), RoutingReplay(ours.module)
    for one, part in ((replay_alone, chosen), (replay, chosen[FIRST[rank] : END[rank]])):
        one.choices = {name: [Choices(part, part)] for name in one.views}
    assert_equal_step(alone, ours, replay_alone, replay, groups)


def recorded_and_played(gate):
    alone, ours, groups = models_of(gate)
    rank = dist.get_rank()
    x, replay_alone, replay = whole_batch(0)[0], RoutingReplay(alone), RoutingReplay(ours.module)
    with replay_alone.record():
        alone(x)
    with replay.record():
        ours(x[FIRST[rank] : END[rank]])
    for name, (choices,) in replay_alone.choices.items():
        (own,) = replay.choices[name]
        assert torch.equal(own.selected, choices.selected[FIRST[rank] : END[rank]])
        assert torch.equal(own.kept, choices.kept[FIRST[rank] : END[rank]])
    assert_equal_step(alone.eval(), ours.eval(), replay_alone, replay, groups)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_choices_made_elsewhere(pool, name, with_gaps):
    pool.run(played_from_elsewhere, GATES[name], with_gaps, world_size=2)


@pytest.mark.parametrize("name", GATES)
def test_recorded_choices(pool, name):
    pool.run(recorded_and_played, GATES[name], world_size=2)
