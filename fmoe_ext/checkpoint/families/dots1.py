"""dots.llm1: the MoE layers of DeepSeek-V3."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3

FAMILY = replace(deepseek_v3.FAMILY, name="dots1", holds=("dots1",))
