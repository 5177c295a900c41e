"""MiMo-V2-Flash: the MoE layers of DeepSeek-V3 without shared experts."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(
    deepseek_v3.FAMILY,
    name="mimo_v2_flash",
    holds=("mimo_v2_flash",),
    files=replace(deepseek_v3.FAMILY.files, shared=""),
    config={fact: key for fact, key in deepseek_v3.FAMILY.config.items() if fact != "num_shared"},
    layers=kinds_of_layers,
)
