"""dots.llm1."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import Architecture


class Dots1(Architecture):
    name = "dots1"
    model_type = "dots1"
    keys = MappingProxyType({"leading_dense_block_count": "first_k_dense_replace"})
    needs = ("expert_gating_func",)
    defaults = MappingProxyType(
        {
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": None,
        }
    )
    groups_heads = False
