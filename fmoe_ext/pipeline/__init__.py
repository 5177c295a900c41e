"""Pipeline parallelism for models with experts: Pipe over the devices of one process."""

from fmoe_ext.pipeline.balance import balance_by_size, balance_by_time, balance_cost
from fmoe_ext.pipeline.batch_norm import DeferredBatchNorm, defer_batch_norm
from fmoe_ext.pipeline.pipe import BalanceError, Pipe
from fmoe_ext.pipeline.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

__all__ = [
    "BalanceError",
    "DeferredBatchNorm",
    "Namespace",
    "Pipe",
    "Skippable",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "defer_batch_norm",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
]
