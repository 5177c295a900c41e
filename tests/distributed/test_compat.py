"""FastMoE's programs on several processes: a whole one, the scale of its gradients, more than one group of experts."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fmoe_ext.compat as fmoe
from fmoe_ext.compat.gates import NaiveGate
from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.gates import SwipeGate

D, H = 6, 5
PROGRAM = Path(__file__).parents[1] / "compat" / "fastmoe_program.py"


def run_program():
    fmoe.install()
    return runpy.run_path(str(PROGRAM))["main"]()


@pytest.mark.parametrize("world_size", [1, 2])
def test_unchanged_program(pool, world_size):
    for losses in pool.run(run_program, world_size=world_size):
        assert len(losses) == 8
        for name, curve in losses.items():
            assert sum(curve[-3:]) < 0.9 * sum(curve[:3]), (name, curve)


def whole_layer(num_experts):
    """A layer with all experts in one process, and the parameters that a worker of `size` holds of it."""
    torch.manual_seed(0)
    return fmoe.FMoETransformerMLP(num_experts, D, H, activation=nn.Tanh(), top_k=2, gate=NaiveGate).double()


def local_layer(whole, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    num_expert = whole.num_expert // size
    layer = fmoe.FMoETransformerMLP(
        num_expert, D, H, activation=nn.Tanh(), world_size=size, moe_group=group, top_k=2
    ).double()
    mine = slice(rank * num_expert, (rank + 1) * num_expert)
    state = {k: v[mine] if k.startswith("experts.") else v for k, v in whole.state_dict().items()}
    layer.load_state_dict(state)
    return layer


def tokens(rank, rows=7):
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def expert_gradients():
    """Experts in the group of all workers, each worker with the mean loss of its own tokens."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = whole_layer(4)
    whole(torch.cat([tokens(r) for r in range(world_size)])).square().mean().backward()
    expected = dict(whole.named_parameters())
    for choice, factor in (("mean", 1), ("sum", world_size)):
        layer = local_layer(whole, dist.group.WORLD)
        model = fmoe.DistributedGroupedDataParallel(layer, expert_grads=choice)
        model(tokens(rank)).square().mean().backward()
        model.allreduce_params()
        for name, p in layer.named_parameters():
            grad = expected[name].grad
            if name.startswith("experts."):
                grad = factor * grad[2 * rank : 2 * rank + 2]
            torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-15, msg=f"{choice}: {name}")


def test_expert_gradients(pool):
    pool.run(expert_gradients, world_size=2)


def tags_set_after_wrapping(mp_size):
    """FastMoE's test_fmoe_local_ddp: three layers get tags after wrapping; each gradient is the mean over its group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows = [dist.new_group(range(i, i + mp_size)) for i in range(0, world_size, mp_size)]
    columns = [dist.new_group(range(i, world_size, mp_size)) for i in range(mp_size)]
    groups = {"mp": rows[rank // mp_size], "dp": columns[rank % mp_size], "world": dist.group.WORLD}
    torch.manual_seed(rank)
    dense = nn.Sequential(*(nn.Linear(D, D, dtype=torch.float64) for _ in groups))
    model = fmoe.DistributedGroupedDataParallel(
        dense, **{f"{tag}_group": group for tag, group in groups.items()}
    )
    alone = copy.deepcopy(dense)
    for linear, tag in zip(dense, groups, strict=True):
        for p in linear.parameters():
            p.dp_comm = tag
    alone(tokens(rank)).mean().backward()
    model(tokens(rank)).mean().backward()
    model.allreduce_params(reduce_after=False, fp32_allreduce=False)
    for ours, linear, group in zip(dense, alone, groups.values(), strict=True):
        dist.all_reduce(linear.weight.grad, group=group)
        expected = linear.weight.grad / dist.get_world_size(group)
        torch.testing.assert_close(ours.weight.grad, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mp_size", [1, 2])
def test_tags_set_after_wrapping_reduce_over_their_groups(pool, mp_size):
    pool.run(tags_set_after_wrapping, mp_size, world_size=2 * mp_size)


def several_groups():
    """Two layers of one model in different groups, the second one's crossing the first one's."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    first, second = whole_layer(2), whole_layer(4)
    ours = nn.Sequential(local_layer(first, rows[rank // 2]), local_layer(second, columns[rank % 2]))
    for layer, group in zip(ours, (rows[rank // 2], columns[rank % 2]), strict=True):
        assert layer.moe_group is group
    x = tokens(rank)
    out = ours(x)
    torch.testing.assert_close(out, second(first(x)), rtol=1e-12, atol=1e-14)
    out.square().sum().backward()
    # an expert's gradient is that of the tokens of its own group
    members = dist.get_process_group_ranks(columns[rank % 2])
    for r in members:
        second(first(tokens(r))).square().sum().backward()
    e = dist.get_rank(columns[rank % 2])
    torch.testing.assert_close(
        ours[1].experts.htoh4.weight.grad,
        second.experts.htoh4.weight.grad[2 * e : 2 * e + 2],
        rtol=1e-12,
        atol=1e-14,
    )


def test_several_groups(pool):
    pool.run(several_groups, world_size=4)


def exchange_in_two_groups():
    """Rows go to the other rank of a group; another ensure_comm() comes before the backward."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.zeros(1, D, requires_grad=True)
    fmoe.functions.ensure_comm(x, rows[rank // 2])
    gate = torch.tensor([1 - rank % 2])  # the one expert of the other rank
    pos, sent, received, _, num_rows = fmoe.functions.prepare_forward(gate, 1, 2)
    y = fmoe.functions.MOEScatter.apply(x, pos, sent, received, num_rows, 2)
    out = fmoe.functions.MOEGather.apply(y * (10 + rank), pos, sent, received, 1, 2)
    fmoe.functions.ensure_comm(x, columns[rank % 2])
    try:
        (out * (1 + rank)).sum().backward()
    finally:
        fmoe.functions.ensure_comm(x, None)
    other = rank + 1 - 2 * (rank % 2)
    return x.grad.unique().tolist(), [float((10 + other) * (1 + rank))]


def test_backward_exchanges_in_the_group_of_its_forward(pool):
    for grad, expected in pool.run(exchange_in_two_groups, world_size=4):
        assert grad == expected


def swipe_outside_a_layer():
    """FastMoE's gate asks its own group; ours with ranks= is the same computation."""
    torch.manual_seed(0)
    gate = fmoe.gates.SwipeGate(4, 2, 2, 2)
    ours = SwipeGate(4, 2, 2, 2, ranks=GroupRanks(None))
    ours.load_state_dict(gate.state_dict())
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(dist.get_rank())) + 1
    (topk_idx, topk_weights), (expected_idx, expected_weights) = gate(x), ours(x)
    assert torch.equal(topk_idx, expected_idx) and torch.equal(topk_weights, expected_weights)


def test_swipe_gate_outside_a_layer(pool):
    pool.run(swipe_outside_a_layer, world_size=2)
