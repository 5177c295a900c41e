"""fmoe.distributed."""

from torch import nn

from fmoe_ext.compat._core import core


class DistributedGroupedDataParallel(nn.Module):
    """fmoe_ext.distributed.DistributedGroupedDataParallel; calling this class builds that."""

    def __new__(cls, module, auto_allreduce=False, need_sync=True, **kwargs):
        implementation = core(
            "distributed", "DistributedGroupedDataParallel", f"fmoe.distributed.{cls.__name__}"
        )
        return implementation(module, auto_allreduce=auto_allreduce, need_sync=need_sync, **kwargs)


__all__ = ["DistributedGroupedDataParallel"]
