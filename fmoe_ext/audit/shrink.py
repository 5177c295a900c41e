"""A configuration of Transformers made so small that an audit of it takes seconds."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

from fmoe_ext.audit.cases import AuditError

# What each size becomes, where the configuration has it and it is larger.
SIZES = MappingProxyType(
    {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "sliding_window": 16,
    }
)
LISTS_OF_LAYERS = ("layer_types", "mlp_layer_types")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrunk_config(config: Any) -> Any:
    """A copy with every size of SIZES at most what that says; kinds of layers and of routing stay."""
    small = copy.deepcopy(config)
    shares_no_heads = getattr(config, "num_key_value_heads", 0) == getattr(
        config, "num_attention_heads", None
    )
    for name, size in SIZES.items():
        value = _value(small, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            setattr(small, name, size)
    for name in LISTS_OF_LAYERS:
        if isinstance(getattr(small, name, None), list):
            setattr(small, name, getattr(small, name)[: small.num_hidden_layers])
    for name in TOKENS:
        token = getattr(small, name, None)
        if isinstance(token, int) and token >= getattr(small, "vocab_size", token + 1):
            setattr(small, name, None)
    if shares_no_heads:
        small.num_key_value_heads = small.num_attention_heads
    if hasattr(small, "use_cache"):
        small.use_cache = False  # caches of models without attention have no length
    small._attn_implementation = "eager"  # the same sums with and without a mask
    small._experts_implementation = "eager"  # torch's grouped_mm has no float64
    return small


def _value(config: Any, name: str) -> Any:
    """An attribute, None where there is none or where each layer has its own (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except Exception:  # of Transformers, of no public class
        return None


def smallest_vocabulary(config: Any) -> int:
    """vocab_size of a configuration; AuditError where it has none."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise AuditError(
            f"{type(config).__name__} has no vocab_size, so that no batch can be made for it: give batch= and loss="
        )
    return size
