"""Qwen3-MoE, and the language model of Qwen3-VL-MoE, which computes a text as Qwen3-MoE does."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import FixedRouter


class Qwen3Moe(FixedRouter):
    name = "qwen3moe"
    model_type = "qwen3_moe"
    has_factors = True
    also = MappingProxyType({"qwen3vlmoe": ("n_deepstack_layers", "rope.dimension_sections")})
