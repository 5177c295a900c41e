"""Data parallelism beside expert parallelism: process groups, gradient reduction by group, gradient clipping."""

from fmoe_ext.distributed.clipping import clip_grad_norm_
from fmoe_ext.distributed.data_parallel import DistributedGroupedDataParallel, fully_shard_experts
from fmoe_ext.distributed.groups import ParallelGroups, init_groups

__all__ = [
    "DistributedGroupedDataParallel",
    "ParallelGroups",
    "clip_grad_norm_",
    "fully_shard_experts",
    "init_groups",
]
