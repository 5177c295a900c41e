"""FlexOlmo, OLMo-2 models with MoE layers: the MoE layers of OLMoE."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import olmoe

FAMILY = replace(olmoe.FAMILY, name="flex_olmo", holds=("flex_olmo", "olmo2"), gguf=None)
