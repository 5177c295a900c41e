"""DeepSeek-V3.2: the MoE layers of DeepSeek-V3."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(deepseek_v3.FAMILY, name="deepseek_v32", holds=("deepseek_v32",), layers=kinds_of_layers)
