"""fmoe.megatron.distributed."""

import torch.distributed as dist
from torch import nn

from fmoe_ext.integrations.megatron_legacy import data_parallel_groups
from fmoe_ext.megatron.distributed import DistributedDataParallel as _DistributedDataParallel

_groups = None


def _set_groups(**kwargs: dist.ProcessGroup | None) -> None:
    """Sets the groups of DistributedDataParallel by hand: dp_group, moe_group, gate_group."""
    global _groups
    _groups = kwargs


def get_moe_group() -> dist.ProcessGroup | None:
    """The group over which experts are spread: Megatron's data-parallel group."""
    if _groups is None:
        _init()
    assert _groups is not None
    return _groups["moe_group"]


def _init() -> None:
    _set_groups(**data_parallel_groups())


class DistributedDataParallel(_DistributedDataParallel):
    """DistributedGroupedDataParallel over Megatron's groups, or those of _set_groups()."""

    def __init__(
        self,
        module: nn.Module,
        accumulate_allreduce_grads_in_fp32: bool = False,
        use_contiguous_buffers_in_ddp: bool = False,
    ) -> None:
        if _groups is None:
            _init()
        super().__init__(
            module, accumulate_allreduce_grads_in_fp32, use_contiguous_buffers_in_ddp, groups=_groups
        )
