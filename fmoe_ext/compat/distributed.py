"""fmoe.distributed."""

from fmoe_ext.distributed import DistributedGroupedDataParallel

__all__ = ["DistributedGroupedDataParallel"]
