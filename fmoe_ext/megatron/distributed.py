"""The names of fmoe_ext.integrations.megatron.distributed, where they were before."""

from fmoe_ext.integrations.megatron.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
