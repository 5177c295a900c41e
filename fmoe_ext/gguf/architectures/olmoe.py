"""OLMoE."""

from fmoe_ext.gguf.architecture import FixedRouter


class Olmoe(FixedRouter):
    name = "olmoe"
    model_type = "olmoe"
    normalizes = False
    groups_heads = False
