"""K-EXAONE: the MoE layers of DeepSeek-V3, two keys with other names."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="exaone_moe",
    holds=("exaone_moe",),
    config={**deepseek_v3.FAMILY.config, "num_experts": "num_experts", "num_shared": "num_shared_experts"},
    layers=kinds_of_layers,
)
