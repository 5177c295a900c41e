"""Expert parallelism beside PyTorch's own data parallelism and optimizers: after training, as in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.distributed import (
    DistributedGroupedDataParallel,
    clip_grad_norm_,
    fully_shard_experts,
    init_groups,
)
from tests.distributed.layouts import E, Model, batch, fill, local_loss, local_model, local_part, loss_of

ROWS, STEPS, LR, MAX_NORM = [5, 8], 4, 0.05, 0.5
ROWS_OF_FOUR = [5, 8, 2, 7]


def backward_of_one_process(model, step, rows):
    parts = [batch(i, step, n, torch.float64) for i, n in enumerate(rows)]
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    (loss_of(model, x, y, sum(rows)) + 0.5 * model.gate_loss()).backward()


def one_process(rows):
    """{name: parameter after training}."""
    model = fill(Model(E), torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward_of_one_process(model, step, rows)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return dict(model.named_parameters())


def assert_same_gradients(model, groups, norm, rows):
    """Gradients of the first step, and their norm."""
    whole = fill(Model(E), torch.float64)
    backward_of_one_process(whole, 0, rows)
    rank, size = dist.get_rank(groups.ep), dist.get_world_size(groups.ep)
    params = dict(model.named_parameters())
    for name, expected in whole.named_parameters():
        name, grad = local_part(name, expected.grad, rank, size, "fused")
        ours = params[name].grad
        ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
        assert (ours - grad).norm() <= 1e-12 * grad.norm(), name
    torch.testing.assert_close(norm, nn.utils.get_total_norm([p.grad for p in whole.parameters()]))


def split(model):
    """(experts' parameters, all others)."""
    experts = [p for layer in model.moe for p in layer.experts.parameters()]
    ids = {id(p) for p in experts}
    return experts, [p for p in model.parameters() if id(p) not in ids]


def assert_as_one_process(model, groups, rows=ROWS):
    rank, size = dist.get_rank(groups.ep), dist.get_world_size(groups.ep)
    params = dict(model.named_parameters())
    for name, expected in one_process(rows).items():
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


def fsdp2_over_experts():
    """fully_shard of the experts, among the ranks that hold the same ones; all else is replicated."""
    groups, bare = start()
    mesh = DeviceMesh.from_group(groups.experts, "cpu")
    for layer in bare.moe:
        fully_shard_experts(layer, mesh)
    model = DistributedGroupedDataParallel(bare, auto_allreduce=True, **groups.data_parallel_kwargs())
    sharded = [p for p in bare.parameters() if isinstance(p, DTensor)]
    assert len(sharded) == 8 and all(p.to_local().shape[0] == p.shape[0] // 2 for p in sharded)
    others = [p for p in bare.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.Adam([{"params": sharded}, {"params": others}], lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(local_loss(model, ROWS_OF_FOUR, step, groups, torch.float64)).backward()
        model.allreduce_params()
        if step == 0:
            assert_same_gradients(bare, groups, clip_grad_norm_(model, torch.inf), ROWS_OF_FOUR)
        clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
    assert_as_one_process(bare, groups, ROWS_OF_FOUR)
    with pytest.raises(ValueError, match="fully_shard would make one parameter out of pieces"):
        fully_shard_experts(bare.moe[0], DeviceMesh.from_group(groups.ep, "cpu"))


def unfrozen_after_a_forward():
    """Experts that were frozen in a forward without backward learn from the next one, and may be frozen again."""
    groups, x = init_groups(ep=1), torch.randn(6, 4, dtype=torch.float64)

    def sharded():
        torch.manual_seed(0)
        layer = FMoETransformerMLP(3, 4, 5).double()
        fully_shard_experts(layer, DeviceMesh.from_group(groups.experts, "cpu"))
        return layer

    def gradients(layer):
        layer(x).square().sum().backward()
        return [None if p.grad is None else p.grad.full_tensor() for p in layer.experts.parameters()]

    expected = gradients(sharded())
    for is_held in (
        True,
        False,
    ):  # those that the user held before, or those of the module, which are gathered now
        layer = sharded()
        held = list(layer.experts.parameters())
        layer.experts.requires_grad_(False)
        layer(x)
        for p in held if is_held else layer.experts.parameters():
            p.requires_grad_(True)
        torch.testing.assert_close(gradients(layer), expected, rtol=0, atol=0)
        layer.zero_grad()
        next(layer.experts.parameters()).requires_grad_(False)
        assert [g is None for g in gradients(layer)] == [True, False, False, False]


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


def test_fsdp2_over_experts(pool):
    pool.run(fsdp2_over_experts, world_size=4)


def test_requires_grad_is_followed_after_a_forward_without_backward(pool):
    pool.run(unfrozen_after_a_forward, world_size=2)
