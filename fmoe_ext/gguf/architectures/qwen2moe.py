"""Qwen2-MoE."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import FixedRouter


class Qwen2Moe(FixedRouter):
    name = "qwen2moe"
    model_type = "qwen2_moe"
    keys = MappingProxyType(
        {**FixedRouter.keys, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    )
    normalizes = False
    has_biases = True
