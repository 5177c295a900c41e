"""Qwen3.5 and 3.6, the language model: the MoE layers of Qwen2-MoE, whose weights are always normalised."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import qwen2_moe
from fmoe_ext.checkpoint.families.family import every_layer, nothing_more

FAMILY = replace(
    qwen2_moe.FAMILY,
    name="qwen3_5_moe_text",
    holds=("qwen3_5_moe_text",),
    files=replace(qwen2_moe.FAMILY.files, per_expert=None),
    config={fact: key for fact, key in qwen2_moe.FAMILY.config.items() if fact != "normalize"},
    fixed={"normalize": True},
    defaults={},
    layers=every_layer,
    extra=nothing_more,
    gguf=None,
)
