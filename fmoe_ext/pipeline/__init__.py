"""Pipeline parallelism for models with experts.

Pipe runs the layers of an nn.Sequential on the devices of one process; split() and Pipeline cut a model over processes.
"""

from fmoe_ext.pipeline.balance import balance_by_size, balance_by_time, balance_cost
from fmoe_ext.pipeline.batch_norm import DeferredBatchNorm, defer_batch_norm
from fmoe_ext.pipeline.groups import PipelineGroups, init_groups
from fmoe_ext.pipeline.microbatch import NoChunk, count_targets, token_cross_entropy
from fmoe_ext.pipeline.pipe import BalanceError, Pipe
from fmoe_ext.pipeline.schedules import SCHEDULES
from fmoe_ext.pipeline.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables
from fmoe_ext.pipeline.split import split
from fmoe_ext.pipeline.stage import Stage
from fmoe_ext.pipeline.trace import Span, bubble_share, draw
from fmoe_ext.pipeline.train import Pipeline

__all__ = [
    "SCHEDULES",
    "BalanceError",
    "DeferredBatchNorm",
    "Namespace",
    "NoChunk",
    "Pipe",
    "Pipeline",
    "PipelineGroups",
    "Skippable",
    "Span",
    "Stage",
    "balance_by_size",
    "balance_by_time",
    "balance_cost",
    "bubble_share",
    "count_targets",
    "defer_batch_norm",
    "draw",
    "init_groups",
    "pop",
    "skippable",
    "split",
    "stash",
    "token_cross_entropy",
    "verify_skippables",
]
