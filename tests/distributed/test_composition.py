"""Expert parallelism beside PyTorch's own data parallelism and optimizers: after training, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_, init_groups
from tests.distributed.layouts import E, Model, batch, fill, local_loss, local_model, local_part, loss_of

ROWS, STEPS, LR, MAX_NORM = [5, 8], 4, 0.05, 0.5


def one_process():
    """{name: parameter after training}."""
    model = fill(Model(E), torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [batch(i, step, n, torch.float64) for i, n in enumerate(ROWS)]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        (loss_of(model, x, y, sum(ROWS)) + 0.5 * model.gate_loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return dict(model.named_parameters())


def split(model):
    """(experts' parameters, all others)."""
    experts = [p for layer in model.moe for p in layer.experts.parameters()]
    ids = {id(p) for p in experts}
    return experts, [p for p in model.parameters() if id(p) not in ids]


def assert_as_one_process(model, groups):
    rank, size = dist.get_rank(groups.ep), dist.get_world_size(groups.ep)
    params = dict(model.named_parameters())
    for name, expected in one_process().items():
        name, expected = local_part(name, expected.detach(), rank, size, "fused")
        ours = params[name].full_tensor() if isinstance(params[name], DTensor) else params[name]
        torch.testing.assert_close(
            ours, expected, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


def start():
    groups = init_groups(ep=2)
    return groups, local_model(groups, torch.float64)


def fsdp2():
    """fully_shard of the dense layers; gates and experts are DistributedGroupedDataParallel's."""
    groups, bare = start()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (bare.before, bare.after):
        fully_shard(layer, mesh=mesh)
    model = DistributedGroupedDataParallel(bare, auto_allreduce=True, **groups.data_parallel_kwargs())
    sharded = [p for p in bare.parameters() if isinstance(p, DTensor)]
    assert len(sharded) == 4
    others = [p for p in bare.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.Adam([{"params": sharded}, {"params": others}], lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(local_loss(model, ROWS, step, groups, torch.float64)).backward()
        model.allreduce_params()
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    assert_as_one_process(bare, groups)


def ddp():
    """DistributedDataParallel with the experts ignored: it takes what requires a gradient when it is made."""
    groups, bare = start()
    experts, dense = split(bare)
    for p in experts:
        p.requires_grad_(False)
    model = DistributedDataParallel(bare, process_group=groups.data, init_sync=False, broadcast_buffers=False)
    for p in experts:
        p.requires_grad_(True)
    scaled = DistributedGroupedDataParallel(
        nn.ModuleList(layer.experts for layer in bare.moe), **groups.data_parallel_kwargs()
    )
    optimizer = torch.optim.Adam(bare.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(local_loss(model, ROWS, step, groups, torch.float64)).backward()
        scaled.allreduce_params()
        clip(experts, dense, groups)
        optimizer.step()
    assert_as_one_process(bare, groups)


def clip(experts, dense, groups):
    """By hand, as DistributedDataParallel has no clipping: experts are on one rank each, all else on every rank."""
    squares = torch.stack([p.grad.square().sum() for p in experts]).sum()
    dist.all_reduce(squares, group=groups.ep)
    norm = (squares + torch.stack([p.grad.square().sum() for p in dense]).sum()).sqrt()
    for p in experts + dense:
        p.grad *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)


def zero_and_scaler():
    """ZeroRedundancyOptimizer for what all ranks hold, Adam for the experts; the loss scaled by GradScaler."""
    groups, bare = start()
    model = DistributedGroupedDataParallel(
        bare, auto_allreduce=True, share_overflow=True, **groups.data_parallel_kwargs()
    )
    experts, dense = split(bare)
    optimizers = [
        ZeroRedundancyOptimizer(dense, torch.optim.Adam, process_group=groups.data, lr=LR),
        torch.optim.Adam(experts, lr=LR),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(STEPS):
        model.zero_grad()
        scaler.scale(sum(local_loss(model, ROWS, step, groups, torch.float64))).backward()
        model.allreduce_params()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, MAX_NORM)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert_as_one_process(bare, groups)


@pytest.mark.parametrize("train", [fsdp2, ddp, zero_and_scaler])
def test_as_one_process(pool, train):
    pool.run(train, world_size=2)
