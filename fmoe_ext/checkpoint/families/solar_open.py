"""Solar Open: the MoE layers of DeepSeek-V3, in every layer."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import every_layer

FAMILY = replace(deepseek_v3.FAMILY, name="solar_open", holds=("solar_open",), layers=every_layer)
