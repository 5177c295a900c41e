"""Data parallelism beside expert parallelism: process groups, gradient reduction by group, gradient clipping."""

from fmoe_ext.distributed.clipping import clip_grad_norm_
from fmoe_ext.distributed.data_parallel import DistributedGroupedDataParallel
from fmoe_ext.distributed.groups import ParallelGroups, init_groups
from fmoe_ext.distributed.sharding import fully_shard_experts

__all__ = [
    "DistributedGroupedDataParallel",
    "ParallelGroups",
    "clip_grad_norm_",
    "fully_shard_experts",
    "init_groups",
]
