"""clip_grad_norm_ and share_overflow where ranks hold different gradients, or none, or shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.distributed import (
    DistributedGroupedDataParallel,
    clip_grad_norm_,
    fully_shard_experts,
    init_groups,
)


def experts_alone(**options):
    """Parameters without copies, of which only the first rank's have gradients."""
    module = nn.Linear(2, 2, bias=False)
    module.weight.dp_comm = "none"
    model = DistributedGroupedDataParallel(module, **options)
    if dist.get_rank() == 0:
        module.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    return model, module.weight


def clip_on_one_rank():
    model, weight = experts_alone(auto_allreduce=True)
    norms = [clip_grad_norm_(model, 1.0, norm_type).item() for norm_type in (2.0, float("inf"))]
    return norms, None if weight.grad is None else weight.grad.tolist()


def overflow_on_one_rank():
    model, weight = experts_alone(share_overflow=True)
    model.allreduce_params()
    return None if weight.grad is None else weight.grad.tolist()


def large_halves():
    module = nn.Linear(4, 4, bias=False).half()
    model = DistributedGroupedDataParallel(module, share_overflow=True)
    module.weight.grad = torch.full(
        (4, 4), 30000.0, dtype=torch.float16
    )  # 480000 together, which no half holds
    model.allreduce_params()
    return module.weight.grad.unique().tolist()


def local_values(module):
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in module.parameters()]


def overflow_in_a_shard(slice):
    """One rank's shard of its experts overflows: ranks with other experts, or in another slice, skip the step too."""
    groups = init_groups(ep=2, slice=slice)
    torch.manual_seed(0)
    layout = dict(world_size=2, moe_group=groups.ep, slice_group=groups.slice, expert_dp_comm="moe")
    mlp = FMoETransformerMLP(2, 8, 16, gate="softmax", **layout).double()
    fully_shard_experts(mlp, DeviceMesh.from_group(groups.experts, "cpu"))
    model = DistributedGroupedDataParallel(mlp, share_overflow=True, **groups.data_parallel_kwargs())
    parameters = [
        [p for p in mlp.parameters() if isinstance(p, DTensor) is sharded] for sharded in (True, False)
    ]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parameters]  # GradScaler takes no mixture
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = local_values(mlp)
    scaler.scale(model(torch.randn(10, 8, dtype=torch.float64)).square().mean()).backward()
    grad = mlp.experts.htoh4.weight.grad
    assert isinstance(grad, DTensor)
    if dist.get_rank() == 1:
        grad.to_local().fill_(torch.inf)
    model.allreduce_params()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(map(torch.equal, before, local_values(mlp)))


def test_clipping_where_one_rank_has_gradients(pool):
    norms = [pytest.approx(5.0), pytest.approx(0.8)]  # of 3 and 4, then of 0.6 and 0.8
    first, second = pool.run(clip_on_one_rank, world_size=2, timeout=60.0)
    assert first == (norms, [[pytest.approx(0.6), 0.0], [0.0, pytest.approx(0.8)]])
    assert second == (norms, None)


def test_overflow_where_one_rank_has_gradients(pool):
    assert pool.run(overflow_on_one_rank, world_size=2, timeout=60.0) == [[[3.0, 0.0], [0.0, 4.0]], None]


def test_gradients_whose_sum_overflows_are_finite(pool):
    assert pool.run(large_halves, world_size=2) == [[30000.0]] * 2


@pytest.mark.parametrize("slice", [1, 2])
def test_overflow_of_sharded_experts_is_shared(pool, slice):
    assert pool.run(overflow_in_a_shard, slice) == [(2.0, True)] * 4
