"""dots.llm1."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import Architecture


class Dots1(Architecture):
    name = "dots1"
    model_type = "dots1"
    keys = MappingProxyType({"leading_dense_block_count": "first_k_dense_replace"})
    needs = ("expert_gating_func",)
    defaults = MappingProxyType({"sliding_window": None})
    groups_heads = False
