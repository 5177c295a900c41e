"""FairScale's and torchgpipe's Pipe: an nn.Sequential on the devices of one process.

For programs that come from there. A new one takes fmoe_ext.pipeline.split and Pipeline, over processes.
"""

from fmoe_ext.compat.fairscale.balance import balance_by_size, balance_by_time
from fmoe_ext.compat.fairscale.batch_norm import DeferredBatchNorm, defer_batch_norm
from fmoe_ext.compat.fairscale.microbatch import NoChunk
from fmoe_ext.compat.fairscale.pipe import BalanceError, Pipe
from fmoe_ext.compat.fairscale.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from fmoe_ext.planning.layouts import balance_cost

__all__ = [
    "BalanceError",
    "DeferredBatchNorm",
    "Namespace",
    "NoChunk",
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
