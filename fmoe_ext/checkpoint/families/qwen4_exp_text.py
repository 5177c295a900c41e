"""Qwen4 (experimental), the language model: the MoE layers of Qwen2-MoE."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import qwen2_moe
from fmoe_ext.checkpoint.families.family import every_layer, nothing_more

FAMILY = replace(
    qwen2_moe.FAMILY,
    name="qwen4_exp_text",
    holds=("qwen4_exp_text",),
    files=replace(qwen2_moe.FAMILY.files, per_expert=None),
    defaults={"norm_topk_prob": True},
    layers=every_layer,
    extra=nothing_more,
    gguf=None,
)
