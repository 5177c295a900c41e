"""Architectures with latent attention: DeepSeek-V2, V3 and Kimi K2, GLM-4.7-Flash, GLM-5 and Kimi Linear.

Keys and values of all heads are widened from one latent vector of `rank` numbers a token, by kv_b_proj:

    kv_b_proj [heads * (nope + v), rank]      for each head, nope rows of keys (without rotary part), then v of values

llama.cpp computes attention on the latent vectors, as one head of keys that are values, too. So the file has the two
parts of kv_b_proj apart: keys [heads, rank, nope], which it multiplies the queries by, and values [heads, v, rank].

Files of DeepSeek-V2 and V3 are both called deepseek2: the score of the router (expert_gating_func) tells them apart.
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.recurrent import KEY_HEADS, kinds_of
from fmoe_ext.gguf.transforms import TensorTransform, exp, log, one, renamed

_NOPE_AND_ROPE = "attention.key_length_mla"


class DeepseekV2(Architecture):
    name = "deepseek2"
    # without groups: llama.cpp ranks a group by its two best scores, DeepSeek-V2 by the best one
    model_type = "deepseek_v2"
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
        # a head of queries and keys has a part with rotary embeddings and one without
        nope = values.pop("qk_head_dim") - values["qk_rope_head_dim"]
        return {"num_key_value_heads": values["num_attention_heads"], "qk_nope_head_dim": nope}

    def yarn_attention(self, said: Values, factor: float) -> Values:
        # llama.cpp has one number for both, 0.1 times theirs; 0 stays in `said`, so that it is refused
        scale = said.setdefault("yarn_log_multiplier", 0)
        if scale > 0:
            del said["yarn_log_multiplier"]
        return dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale if scale > 0 else 0)

    def attention(self, config: Any) -> dict[str, Any]:
        # attention as llama.cpp computes it, with one latent head, and (_mla) as the model has it
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

        # [heads, rank, nope] and [heads, v, rank] <-> [heads * (nope + v), rank]
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
    has_mtp = True


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash; without a config.json beside it, its file is read as DeepSeek-V3."""

    model_type = "glm4_moe_lite"


_INDEXER = MappingProxyType(
    {
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    }
)
_TYPES = "attention.indexer.types"


class GlmDsa(DeepseekV3):
    """GLM-5: DeepSeek-V3 with indexers, which choose the tokens that a layer attends to."""

    name = "glm-dsa"
    model_type = "glm_moe_dsa"
    keys = MappingProxyType({**DeepseekV3.keys, **_INDEXER, _TYPES: "indexer_types"})
    needs = (*DeepseekV2.needs[1:], *_INDEXER)
    defaults = DeepseekV2.defaults
    writes_heads = True

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        num_layers = values["num_hidden_layers"]
        # without the key every layer has an indexer of its own, but not in models of 2^20 tokens: there it is needed
        usual = None if values["max_position_embeddings"] >= 2**20 else [True] * num_layers
        types = values.get("indexer_types", usual)
        if not isinstance(types, list) or len(types) < num_layers:
            raise CheckpointError(
                f"{self.name}.{_TYPES} is {types!r}, expected a list of {num_layers} entries"
            )
        values["indexer_types"] = ["full" if full else "shared" for full in types[:num_layers]]
        return values

    def fields(self, config: Any) -> dict[str, Any]:
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _INDEXER.items()},
            _TYPES: [kind == "full" for kind in config.indexer_types],
        }


_DELTA = MappingProxyType({"ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"})


class KimiLinear(DeepseekV2):
    """Kimi Linear: latent attention without rotary embeddings, and layers of Kimi's delta attention."""

    name = "kimi-linear"
    model_type = "kimi_linear"
    keys = MappingProxyType({**DeepseekV2.keys, **_DELTA})
    harmless = ("rope.freq_base", "attention.value_length")  # of rotary embeddings; without latent attention
    needs = (*DeepseekV2.needs[1:], *_DELTA, KEY_HEADS)
    defaults = MappingProxyType({"moe_renormalize": True, "q_lora_rank": None, "pad_token_id": None})
    fixed = MappingProxyType({"moe_renormalize": True, "tie_word_embeddings": False})

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        return {**values, "linear_num_heads": values["num_attention_heads"]}

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        return kinds_of(fields, num_layers, "linear_attention")

    def fields(self, config: Any) -> dict[str, Any]:
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _DELTA.items()},
            KEY_HEADS: [int(kind == "full_attention") for kind in config.layer_types],
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        gate = "self_attn.forget_gate."
        return {
            **super().transforms(config),
            f"{gate}f_a_proj.weight": renamed("ssm_f_a.weight"),
            f"{gate}f_b_proj.weight": renamed("ssm_f_b.weight"),
            f"{gate}dt_bias": renamed("ssm_dt.bias"),
            f"{gate}A_log": one(
                "ssm_a", lambda a: log(a).reshape(1, 1, -1, 1), lambda a: exp(a).reshape(-1, 1)
            ),
            "self_attn.conv1d.weight": TensorTransform(
                tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),
                lambda *parts: torch.cat([part.reshape(-1, 1, part.shape[-1]) for part in parts]),
                lambda w: w.chunk(3),
            ),
        }
