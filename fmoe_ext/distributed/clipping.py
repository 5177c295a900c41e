"""Gradient clipping across groups."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fmoe_ext.distributed.data_parallel import DistributedGroupedDataParallel


def clip_grad_norm_(
    module: DistributedGroupedDataParallel, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scales the gradients of a DistributedGroupedDataParallel so that their norm over the job is at most max_norm.

    Each parameter counts once, on however many ranks it has copies or shards (DTensor; every rank of dp_group has
    some). Call it on all ranks, after the reduction; one that auto_allreduce has begun is ended first.
    Returns the norm before scaling. Equivalent, in one process: torch.nn.utils.clip_grad_norm_.
    """
    if not isinstance(module, DistributedGroupedDataParallel):
        raise TypeError(f"module must be a DistributedGroupedDataParallel, but got {type(module).__name__}")
    module.finish_reduction()
    norm_type = float(norm_type)
    dp_group = module.groups["dp"]
    dp_ranks = set(dist.get_process_group_ranks(dp_group))
    params = [(tag, p) for tag, params in module.tagged.items() for p in params if p.grad is not None]
    sharded = [p for p in module.parameters() if isinstance(p, DTensor) and p.grad is not None]
    everything = [p.grad for _, p in params if p.grad is not None]
    everything += [p.grad.to_local() for p in sharded if isinstance(p.grad, DTensor)]
    if not everything:
        return torch.tensor(0.0)
    accumulate = torch.float64 if any(g.dtype == torch.float64 for g in everything) else torch.float32
    total = torch.zeros((), dtype=accumulate, device=everything[0].device)
    counted = [(p.grad, _num_copies(module, tag, dp_ranks)) for tag, p in params]
    counted += [(p.grad, len(dp_ranks)) for p in sharded]  # the norm of the whole, on each rank
    for grad, copies in counted:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=accumulate)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if norm_type == float("inf"):
            total = torch.maximum(total, norm)
        else:
            total += norm.pow(norm_type) / copies
    if norm_type == float("inf"):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=dp_group)
    else:
        dist.all_reduce(total, group=dp_group)
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in everything:
        grad.mul_(scale.to(grad.dtype))
    return total


def _num_copies(module: DistributedGroupedDataParallel, tag: str, dp_ranks: set[int]) -> int:
    return 1 if tag == "none" else len(dp_ranks & set(dist.get_process_group_ranks(module.groups[tag])))
