"""MiMo-V2-Flash: the MoE layers of DeepSeek-V3 without shared experts."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="mimo_v2_flash",
    holds=("mimo_v2_flash",),
    layers=kinds_of_layers,
    files=replace(deepseek_v3.FAMILY.files, shared=""),
    config={k: v for k, v in deepseek_v3.FAMILY.config.items() if k != "num_shared"},
)
