"""GLM-4.7-Flash: the MoE layers of DeepSeek-V3, at any place."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import deepseek_v3
from fmoe_ext.checkpoint.families.family import Numbers, Values


def _kinds(name: str, moe: Numbers, dense: Numbers) -> Values:
    return {"mlp_layer_types": ["sparse" if i in moe else "dense" for i in sorted((*moe, *dense))]}


FAMILY = replace(deepseek_v3.FAMILY, name="glm4_moe_lite", holds=("glm4_moe_lite",), layers=_kinds)
