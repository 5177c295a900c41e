"""Data parallelism beside expert parallelism: dense parameters have copies on all ranks, an expert only on some.

So each parameter names the group that reduces its gradient (data_parallel.py), the groups come from one call
(groups.py), and clipping counts every parameter of the job once (clipping.py). fully_shard_experts() is FSDP2 for the
experts.
"""

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
