"""Pipeline parallelism for models with experts: split() cuts them into stages, Pipeline trains these."""

from typing import NoReturn

from fmoe_ext.pipeline.groups import PipelineGroups, init_groups
from fmoe_ext.pipeline.microbatch import count_targets, token_cross_entropy
from fmoe_ext.pipeline.schedules import SCHEDULES
from fmoe_ext.pipeline.split import split
from fmoe_ext.pipeline.stage import Stage
from fmoe_ext.pipeline.trace import Span, bubble_share, draw
from fmoe_ext.pipeline.train import Pipeline

__all__ = [
    "SCHEDULES",
    "Pipeline",
    "PipelineGroups",
    "Span",
    "Stage",
    "bubble_share",
    "count_targets",
    "draw",
    "init_groups",
    "split",
    "token_cross_entropy",
]

_IN_FAIRSCALE = (
    "BalanceError", "DeferredBatchNorm", "Namespace", "NoChunk", "Pipe", "Skippable", "balance_by_size",
    "balance_by_time", "balance_cost", "defer_batch_norm", "pop", "skippable", "stash", "verify_skippables",
)  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    if name in _IN_FAIRSCALE:  # no AttributeError: `from fmoe_ext.pipeline import Pipe` would drop its text
        raise ImportError(f"fmoe_ext.pipeline.{name} is fmoe_ext.compat.fairscale.{name} now")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
