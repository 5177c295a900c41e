"""Qwen3.5 and 3.6, the language model: the MoE layers of Qwen2-MoE, weights always normalised."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import qwen2_moe
from fmoe_ext.checkpoint.families.family import every_layer, nothing_more

FAMILY = replace(
    qwen2_moe.FAMILY,
    name="qwen3_5_moe_text",
    holds=("qwen3_5_moe_text",),
    files=replace(qwen2_moe.FAMILY.files, per_expert=None),
    config={k: v for k, v in qwen2_moe.FAMILY.config.items() if k != "normalize"},
    fixed={"normalize": True},
    layers=every_layer,
    extra=nothing_more,
    gguf=None,
)
