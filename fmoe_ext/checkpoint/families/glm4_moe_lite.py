"""GLM-4.7-Flash: the MoE layers of DeepSeek-V3, at any place."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(deepseek_v3.FAMILY, name="glm4_moe_lite", holds=("glm4_moe_lite",), layers=kinds_of_layers)
