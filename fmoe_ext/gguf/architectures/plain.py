"""Architectures that data describe, all but one check; architecture.py explains the fields. Others have a file each."""

from types import MappingProxyType
from typing import Any

from fmoe_ext.gguf.architecture import Architecture, FixedRouter


class Afmoe(Architecture):
    """Trinity."""

    name = "afmoe"
    model_type = "afmoe"
    keys = MappingProxyType(
        {"leading_dense_block_count": "num_dense_layers", "attention.sliding_window": "sliding_window"}
    )
    needs = ("expert_weights_norm", "attention.sliding_window")
    defaults = MappingProxyType({"mup_enabled": True})
    fixed = MappingProxyType({"mup_enabled": True})
    window_period = 4


class Dots1(Architecture):
    """dots.llm1."""

    name = "dots1"
    model_type = "dots1"
    keys = MappingProxyType({"leading_dense_block_count": "first_k_dense_replace"})
    needs = ("expert_gating_func",)
    defaults = MappingProxyType({"sliding_window": None})
    groups_heads = False


class Ernie45Moe(Architecture):
    """ERNIE 4.5 MoE."""

    name = "ernie4_5-moe"
    model_type = "ernie4_5_moe"
    keys = MappingProxyType(
        {
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        }
    )
    defaults = MappingProxyType({"moe_layer_interval": 1, "moe_num_shared_experts": 0})

    def refused(self, config: Any) -> dict[str, bool]:
        # the K largest of E probabilities sum to K / E at least: a lower bound on the sum changes nothing
        is_felt = (config.moe_norm_min or 0) > config.moe_k / config.moe_num_experts
        return {"moe_norm_min": is_felt, **super().refused(config)}


class HunyuanMoe(Architecture):
    """Hunyuan-A13B."""

    name = "hunyuan-moe"
    model_type = "hunyuan_v1_moe"


class Llama(FixedRouter):
    """Mixtral, and dense Llama and Mistral models with MoE layers."""

    name = "llama"
    model_type = "mixtral"
    has_factors = True
    rotates_pairs = True


class MiniMaxM2(Architecture):
    """MiniMax-M2."""

    name = "minimax-m2"
    model_type = "minimax_m2"
    rotates_part = True


class Olmoe(FixedRouter):
    """OLMoE."""

    name = "olmoe"
    model_type = "olmoe"
    normalizes = False
    groups_heads = False


class Qwen2Moe(FixedRouter):
    """Qwen1.5-MoE and Qwen2-MoE."""

    name = "qwen2moe"
    model_type = "qwen2_moe"
    keys = MappingProxyType(
        {**FixedRouter.keys, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    )
    normalizes = False
    has_biases = True


class Qwen3Moe(FixedRouter):
    """Qwen3-MoE, and the language model of Qwen3-VL-MoE, which computes a text as Qwen3-MoE does."""

    name = "qwen3moe"
    model_type = "qwen3_moe"
    has_factors = True
    also = MappingProxyType({"qwen3vlmoe": ("n_deepstack_layers", "rope.dimension_sections")})
