"""DeepSeek-V2 and V3 with Kimi K2, whose router's score says which, and GLM-4.7-Flash: latent attention.

llama.cpp computes it as attention with one head of latent keys, which are values too: kv_b_proj, which widens them, is
in the file as keys [heads, rank, nope], absorbed in the queries, and values [heads, v, rank].
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.gguf.architecture import Architecture, Values
from fmoe_ext.gguf.transforms import TensorTransform

_NOPE_AND_ROPE = "attention.key_length_mla"


class DeepseekV2(Architecture):
    name = "deepseek2"
    model_type = "deepseek_v2"  # without groups, which llama.cpp ranks by two scores
    keys = MappingProxyType(
        {
            "leading_dense_block_count": "first_k_dense_replace",
            _NOPE_AND_ROPE: "qk_head_dim",
            "attention.value_length_mla": "v_head_dim",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.q_lora_rank": "q_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        }
    )
    read = ("attention.head_count_kv", "attention.key_length")
    needs: tuple[str, ...] = ("expert_gating_func", _NOPE_AND_ROPE, "rope.dimension_count")
    defaults = MappingProxyType({"q_lora_rank": None})

    def heads(self, values: Values) -> Values:
        nope = values.pop("qk_head_dim") - values["qk_rope_head_dim"]
        return {"num_key_value_heads": values["num_attention_heads"], "qk_nope_head_dim": nope}

    def yarn_attention(self, said: Values, factor: float) -> Values:
        # llama.cpp's graph needs both to be equal; 0 stays in `said`, to be refused
        scale = said.setdefault("yarn_log_multiplier", 0)
        if scale > 0:
            del said["yarn_log_multiplier"]
        return dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale if scale > 0 else 0)

    def attention(self, config: Any) -> dict[str, Any]:
        found = {
            "attention.head_count_kv": 1,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            _NOPE_AND_ROPE: config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
        if config.q_lora_rank is not None:
            found["attention.q_lora_rank"] = config.q_lora_rank
        return found

    def refused(self, config: Any) -> dict[str, bool]:
        return {**super().refused(config), "rope_interleave": not getattr(config, "rope_interleave", True)}

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        heads, nope, width = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim

        def read(keys: Tensor, values: Tensor) -> Tensor:
            return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)

        def write(w: Tensor) -> tuple[Tensor, ...]:
            keys, values = w.unflatten(0, (heads, nope + width)).split((nope, width), 1)
            return keys.transpose(1, 2), values

        latent = TensorTransform(("attn_k_b.weight", "attn_v_b.weight"), read, write)
        return {**super().transforms(config), "self_attn.kv_b_proj.weight": latent}


class DeepseekV3(DeepseekV2):
    model_type = "deepseek_v3"
    keys = MappingProxyType(
        {**DeepseekV2.keys, "expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
    )
    defaults = MappingProxyType({**DeepseekV2.defaults, "num_mtp_layers": 0})
    has_heads = True


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash, whose file alone is read as DeepSeek-V3."""

    model_type = "glm4_moe_lite"
