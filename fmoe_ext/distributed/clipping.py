"""Clip gradients whose parameters have copies on different groups of ranks.

    norm^p = sum over ranks, over the rank's parameters, of |grad|^p / (ranks that have a copy)

so that the sum counts every parameter of the job once. The largest norm (p = inf) needs no division. The sum is in
float64, the norm of one gradient in float32 at least, since squares overflow 16 bits. clip_grad_norm_() is for a
DistributedGroupedDataParallel; a pipeline (pipeline/train.py) calls norm_over() and scale_to_norm() with its groups.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fmoe_ext._sharded import is_dtensor
from fmoe_ext.distributed.data_parallel import DistributedGroupedDataParallel
from fmoe_ext.distributed.groups import device_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def clip_grad_norm_(
    module: DistributedGroupedDataParallel, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of a DistributedGroupedDataParallel so that their norm over the job is at most max_norm.

    Each parameter counts once, on however many ranks it has copies or shards (DTensor). Call it on all ranks, after the
    reduction; one that auto_allreduce has begun is ended first.
    Returns the norm before scaling. ValueError for norm_type 0 or -inf. Equivalent, in one process:
    torch.nn.utils.clip_grad_norm_.

    Example:

        >>> store = torch.distributed.HashStore()  # torchrun makes one; then init_process_group() needs no arguments
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = fmoe_ext.DistributedGroupedDataParallel(torch.nn.Linear(4, 1), auto_allreduce=True)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> clip_grad_norm_(model, max_norm=1.0)  # 5 gradients of 1
        tensor(2.2361)
        >>> model.module.weight.grad.norm() < 1
        tensor(True)
    """
    if not isinstance(module, DistributedGroupedDataParallel):
        raise TypeError(f"module must be a DistributedGroupedDataParallel, but got {type(module).__name__}")
    module.finish_reduction()
    # Each gradient with the number of ranks of dp_group, over which the sum goes, that have a copy of it.
    dp_group = module.groups["dp"]
    dp_ranks = set(dist.get_process_group_ranks(dp_group))
    counted: list[tuple[torch.Tensor, int]] = []
    for tag, params in module.tagged.items():
        copies = 1
        if tag != "none":
            copies = len(dp_ranks & set(dist.get_process_group_ranks(module.groups[tag])))
        counted += [(p.grad, copies) for p in params if p.grad is not None]
    # every rank that has a part of a sharded gradient adds the norm of the whole
    sharded: list[DTensor] = [p.grad for p in module.parameters() if is_dtensor(p.grad)]
    counted += [(grad, len(dp_ranks & set(grad.device_mesh.mesh.flatten().tolist()))) for grad in sharded]
    total = norm_over(counted, norm_type, [dp_group], device_of(module))
    scale_to_norm([grad for grad, _ in counted], total, max_norm)
    return total


def norm_over(
    counted: Sequence[tuple[torch.Tensor, int]],
    norm_type: float,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> torch.Tensor:
    """Compute the norm of gradients over ranks. counted: (gradient, ranks that count it); a DTensor counts whole.

    groups: the sum goes over these, one after the other; together they span all ranks, and all of them call this, also
    those without gradients. ValueError for norms that no sum of powers gives: 0, -inf.
    """
    norm_type = float(norm_type)
    if norm_type in (0.0, float("-inf")) or norm_type != norm_type:
        raise ValueError(f"norm_type must be a number other than 0, or inf, but got {norm_type}")
    is_max = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, copies in counted:
        # full_tensor() of a DTensor's norm is a collective call of the ranks that have its shards
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
        norm = (norm.full_tensor() if is_dtensor(norm) else norm).double()
        total = torch.maximum(total, norm) if is_max else total + norm.pow(norm_type) / copies
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    total = total if is_max else total.pow(1 / norm_type)
    return total if any(g.dtype == torch.float64 for g, _ in counted) else total.float()


def scale_to_norm(grads: Sequence[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients whose norm is total so that it becomes at most max_norm."""
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for grad in grads:
        local = grad.to_local() if is_dtensor(grad) else grad
        local.mul_(scale.to(local.dtype))
