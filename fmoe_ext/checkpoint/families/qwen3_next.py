"""Qwen3-Next: the MoE layers of Qwen2-MoE."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import qwen2_moe
from fmoe_ext.checkpoint.families.family import nothing_more

FAMILY = replace(
    qwen2_moe.FAMILY,
    name="qwen3_next",
    holds=("qwen3_next",),
    defaults={"norm_topk_prob": True},
    extra=nothing_more,
    gguf=None,
)
