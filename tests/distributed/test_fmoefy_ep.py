"""fmoefied models whose experts are spread over processes, against one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext import fmoefy, gates
from fmoe_ext.distributed import DistributedGroupedDataParallel, init_groups

D, H, E = 8, 12, 8
STEPS = 3


def dense():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, H, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def tokens(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 5, D, dtype=torch.float64, generator=generator)


def train(model, moe, x, synchronise=lambda: None):
    """Losses of a few steps, the mean over all processes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        task, balance = model(x).square().mean(), 0.1 * gates.total_loss(moe)
        (task + balance).backward()
        synchronise()
        optimizer.step()
        losses.append((task.detach(), balance.detach()))
    return losses


def on_ranks(options, ep):
    torch.manual_seed(3 + dist.get_rank())  # the ranks agree on what must be the same
    groups = init_groups(ep=ep)
    kwargs = {} if ep == dist.get_world_size() else {"moe_group": groups.ep, "gate_group": groups.world}
    if kwargs:
        torch.manual_seed(3)  # copies of experts are the same from the start only with one seed
        kwargs["expert_dp_comm"] = "moe"
    moe = fmoefy(dense(), E, **options, **kwargs)
    assert moe.fmoe_report.num_ranks == ep
    before = dense()
    x = tokens(dist.get_rank())
    first_error = (moe(x) - before(x)).abs().max().item()
    gates.total_loss(moe)
    count = moe.fmoe_report.parameters_after
    model = DistributedGroupedDataParallel(moe, auto_allreduce=True, **groups.data_parallel_kwargs())
    losses = []
    for task, balance in train(model, moe, x, model.allreduce_params):
        dist.all_reduce(task)
        losses.append((task / dist.get_world_size() + balance).item())
    return first_error, count, losses


def in_one_process(options, world_size):
    torch.manual_seed(3)
    moe = fmoefy(dense(), E, **options)
    x = torch.cat([tokens(rank) for rank in range(world_size)])
    count = moe.fmoe_report.parameters_after
    return count, [(task + balance).item() for task, balance in train(moe, moe, x)]


def compare(pool, options, world_size, ep):
    count, expected = in_one_process(options, world_size)
    assert expected[-1] < expected[0]
    results = pool.run(on_ranks, options, ep, world_size=world_size, timeout=400.0)
    for first_error, rank_count, losses in results:
        if options["init"] == "upcycle":
            assert first_error < 1e-12
        assert rank_count == count
        for ours, theirs in zip(losses, expected, strict=True):
            assert abs(ours - theirs) <= 1e-11 * abs(theirs), (losses, expected)


def test_upcycled_over_two_processes(pool):
    compare(pool, {"init": "upcycle"}, 2, 2)


def test_slices_over_two_processes(pool):
    compare(pool, {"init": "upcycle", "split": 4, "gate": "sigmoid"}, 2, 2)


def test_random_experts_inside_data_parallelism(pool):
    compare(pool, {"init": "random"}, 4, 2)


def disagree():
    model = fmoefy(copy.deepcopy(dense()), 4, distributed_experts=False)
    assert model.fmoe_report.num_ranks == 1 and model.layers[0].linear1.moe_group is None
    try:
        fmoefy(dense(), 4 + 2 * dist.get_rank())
    except ValueError as error:
        return str(error)


def test_ranks_that_disagree_are_named(pool):
    for text in pool.run(disagree, world_size=2):
        assert (
            "layers.0.linear1 and d_model, d_hidden, num_local_experts, top_k must be the same on ranks [0, 1]"
            in text
        )
