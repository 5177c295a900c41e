"""Metadata of a GGUF file that follows from a configuration: what export writes and what a file is compared with."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from fmoe_ext.checkpoint.families.family import Family

Facts: TypeAlias = dict[str, Any]  # {key behind the architecture: value}
GATING = MappingProxyType({"softmax": 1, "sigmoid": 2})  # expert_gating_func in llama.cpp
EPSILON = "attention.layer_norm_rms_epsilon"
# Keys on layers and routers of files that say how their routers compute
ROUTING = (
    *("expert_gating_func", "expert_shared_count", "expert_weights_scale"),
    *("interleave_moe_layer_step", "leading_dense_block_count"),
)


def gating_of(family: Family) -> int:
    """expert_gating_func of a family's router."""
    return GATING["sigmoid" if family.gates[-1] == "SigmoidGate" else "softmax"]


def rope_of(config: Any) -> Mapping[str, Any]:
    """rope_parameters of a configuration's layers with full attention, empty for models without rotary embeddings."""
    said = getattr(config, "rope_parameters", None) or {}
    found: Mapping[str, Any] = said.get("full_attention", said)
    return found


def first_layer(config: Any) -> Any:
    """Returns the first layer's configuration, where Transformers has one a layer; else the model's."""
    return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config


def facts(config: Any, family: Family) -> Facts:
    """Metadata that llama.cpp needs beside the tensors of a model: {key behind the architecture: value}."""
    whole, config = config, first_layer(config)
    architecture = family.gguf
    assert architecture is not None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found: Facts = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    if architecture.is_latent:
        found |= _latent_attention(config)
    else:
        partial = rope_of(config).get("partial_rotary_factor", 1)
        found |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": int(head_dim * partial),
        }
    said = family.facts_of(config.to_dict()) if architecture.says_routing else {}
    for fact in ("num_experts", "top_k"):
        said.setdefault(fact, getattr(config, family.config[fact]))
    found |= {
        EPSILON: float(getattr(config, architecture.keys.get(EPSILON) or "rms_norm_eps")),
        "expert_count": said["num_experts"],
        "expert_used_count": said["top_k"],
    }
    if rope_of(config):
        found["rope.freq_base"] = float(rope_of(config)["rope_theta"])
    if hasattr(config, "moe_intermediate_size"):
        found["expert_feed_forward_length"] = config.moe_intermediate_size
    elif architecture.says_routing:
        found["expert_feed_forward_length"] = config.intermediate_size
    if hasattr(config, "shared_expert_intermediate_size"):
        found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if architecture.says_routing:
        found |= _routing(config, family, said)
    if "attention.sliding_window" in architecture.keys:
        found["attention.sliding_window"] = config.sliding_window
    if rope_of(config).get("rope_type") == "yarn":
        found |= _yarn(config)
    if architecture.facts:
        found |= architecture.facts(whole)
    for key, attribute in architecture.multipliers.items():
        found[key] = float(getattr(config, attribute))
    return found


def _yarn(config: Any) -> Facts:
    """rope.scaling, whose factor of the attention is the usual one."""
    said = config.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(said["factor"]),
        "rope.scaling.original_context_length": said.get("original_max_position_embeddings")
        or config.max_position_embeddings,
        "rope.scaling.yarn_beta_fast": float(said.get("beta_fast") or 32),
        "rope.scaling.yarn_beta_slow": float(said.get("beta_slow") or 1),
    }


def _latent_attention(config: Any) -> Facts:
    """llama.cpp computes it as attention with one head of latent keys, which are values too."""
    found: Facts = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank is not None:
        found["attention.q_lora_rank"] = config.q_lora_rank
    return found


def _routing(config: Any, family: Family, said: Mapping[str, Any]) -> Facts:
    """The router's score, scale and layers, which other architectures have in their code."""
    shared = (
        said.get("num_shared", int("num_shared" not in family.config and bool(family.in_modules.shared))) or 0
    )
    first = (family.gguf and family.gguf.keys.get("leading_dense_block_count")) or ""
    kinds = getattr(config, "mlp_layer_types", None)
    found: Facts = {
        "expert_gating_func": gating_of(family),
        "expert_weights_norm": bool(said["normalize"]),
        "expert_weights_scale": float(said.get("scale", 1)),
        "expert_shared_count": shared,
        "leading_dense_block_count": kinds.count("dense") if kinds else getattr(config, first, 0),
        "interleave_moe_layer_step": getattr(config, "moe_layer_interval", 1),
    }
    if shared:
        found["expert_shared_feed_forward_length"] = said.get("shared") or shared * said["d_hidden"]
    if said.get("num_groups", 1) > 1:
        found |= {
            "expert_group_count": said["num_groups"],
            "expert_group_used_count": said["topk_groups"],
        }
    return found
