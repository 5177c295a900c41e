"""GLM-5: the MoE layers of DeepSeek-V3."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import kinds_of_layers

FAMILY = replace(deepseek_v3.FAMILY, name="glm_moe_dsa", holds=("glm_moe_dsa",), layers=kinds_of_layers)
