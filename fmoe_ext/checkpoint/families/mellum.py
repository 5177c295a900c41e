"""Mellum 2: the MoE layers of Qwen3-MoE."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import qwen3_moe
from fmoe_ext.checkpoint.families.family import kinds_of_layers, nothing_more

FAMILY = replace(
    qwen3_moe.FAMILY,
    name="mellum",
    holds=("mellum",),
    defaults={},
    layers=kinds_of_layers,
    extra=nothing_more,
    gguf=None,
)
