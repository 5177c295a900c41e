"""GLM-4.5 and GLM-4.6: the MoE layers of DeepSeek-V3."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="glm4_moe", holds=("glm4_moe",))
