"""Gemma 4: the router sees the tokens before the norm of the experts, which are beside a dense MLP."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import (
    DENSE_NAMES,
    Family,
    Gguf,
    Layout,
    Numbers,
    Values,
    as_configured,
)

SLIDING, FULL = "sliding_attention", "full_attention"
PATTERN = "attention.sliding_window_pattern"
SOFTCAP = "final_logit_softcapping"
UNROTATED = 1e30  # divides the frequency of what is not rotated
# {key: attribute}; the sizes that are written follow from per_layer_config
KEYS = MappingProxyType(
    {
        "attention.sliding_window": "sliding_window",
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "rope.freq_base_swa": "rope_theta_swa",
        SOFTCAP: SOFTCAP,
    }
)


def _kinds(said: Values, num_layers: int) -> list[str]:
    windows = said[PATTERN]
    if not isinstance(windows, list):
        raise TypeError(f"gemma4.{PATTERN} is {windows!r}, expected a list")
    return [SLIDING if windows[i] else FULL for i in range(num_layers)]


def _sizes(config: Any) -> dict[str, list[tuple[int, int]]]:
    """{kind: (head_dim, num_key_value_heads) of each of its layers}."""
    found: dict[str, list[tuple[int, int]]] = {}
    for i, kind in enumerate(config.layer_types):
        own = config.per_layer_config[i]
        found.setdefault(kind, []).append((own.head_dim, own.num_key_value_heads))
    return found


def _head_dim(config: Any, kind: str) -> int:
    sizes = _sizes(config)
    return sizes.get(kind, next(iter(sizes.values())))[0][0]


def _facts(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    first = config.num_hidden_layers - config.num_kv_shared_layers
    width = config.intermediate_size
    heads = [config.per_layer_config[i].num_key_value_heads for i in layers]
    full, sliding = _head_dim(config, FULL), _head_dim(config, SLIDING)
    found = {
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), full),
        **{f"{key}_swa": sliding for key in ("attention.key_length", "attention.value_length")},
        "rope.dimension_count_swa": sliding,
        "rope.freq_base_swa": float(config.rope_parameters[SLIDING]["rope_theta"]),
        "attention.head_count_kv": heads[0] if len({*heads}) == 1 else heads,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        PATTERN: [kind == SLIDING for kind in config.layer_types],
        SOFTCAP: float(config.final_logit_softcapping or 0),
    }
    if config.use_double_wide_mlp and first < config.num_hidden_layers:
        found["feed_forward_length"] = [width * (2 if i >= first > 0 else 1) for i in layers]
    return found


def _factors(config: Any) -> Tensor:
    full = config.rope_parameters[FULL]
    part = full.get("partial_rotary_factor", 1.0) if full["rope_type"] == "proportional" else 1.0
    head_dim = _head_dim(config, FULL)
    factors = torch.ones(head_dim // 2, device="cpu")
    factors[int(part * head_dim // 2) :] = UNROTATED
    return factors


def _refused(config: Any) -> dict[str, bool]:
    rope, kinds = config.rope_parameters, config.layer_types
    first = config.num_hidden_layers - config.num_kv_shared_layers
    # llama.cpp shares the last layer's keys, or with a window those of the layer before it
    shared = {kind: first - (2 if kind == SLIDING else 1) for kind in kinds[first:]}
    full, sliding = rope.get(FULL, {}), rope.get(SLIDING, {})
    return {
        "rope_parameters": full.get("rope_type") not in ("default", "proportional")
        or full.get("factor", 1.0) != 1
        or sliding.get("rope_type") != "default",
        "num_kv_shared_layers": any(
            i < 0 or kinds[i] != kind or kind in kinds[i + 1 : first] for kind, i in shared.items()
        ),
        "use_bidirectional_attention": config.use_bidirectional_attention == "all",
        "vocab_size_per_layer_input": bool(config.hidden_size_per_layer_input)
        and config.vocab_size_per_layer_input != config.vocab_size,
    }


def _heads(values: dict[str, Any], kind: str) -> int:
    said, num_layers = values["num_key_value_heads"], values["num_hidden_layers"]
    found = said if isinstance(said, list) else [said] * num_layers
    if len(found) < num_layers or any(type(heads) is not int for heads in found):
        raise CheckpointError(f"attention.head_count_kv is {said!r}, expected {num_layers} numbers of heads")
    own = {heads for heads, other in zip(found, values["layer_types"], strict=False) if other == kind}
    if len(own) > 1:
        raise CheckpointError(f"attention.head_count_kv has {sorted(own)} heads in layers of {kind}")
    return own.pop() if own else found[0]


def _finish(values: dict[str, Any], shapes: Mapping[str, Numbers], factors: Tensor | None) -> None:
    kinds, num_layers = values["layer_types"], values["num_hidden_layers"]
    own = {"head_dim": values.pop("global_head_dim"), "num_key_value_heads": _heads(values, FULL)}
    values["num_key_value_heads"] = _heads(values, SLIDING)
    values["per_layer_config"] = {i: own for i, kind in enumerate(kinds) if kind == FULL}
    first = num_layers - values["num_kv_shared_layers"]
    values["attention_k_eq_v"] = any(
        kind == FULL and f"blk.{i}.attn_v.weight" not in shapes for i, kind in enumerate(kinds[:first])
    )
    widths = [shapes.get(f"blk.{i}.ffn_up.weight", (0,))[0] for i in (0, num_layers - 1)]
    values["use_double_wide_mlp"] = widths[1] == 2 * widths[0]
    values["vocab_size_per_layer_input"] = values["vocab_size"]
    values[SOFTCAP] = values[SOFTCAP] or None
    if factors is None:
        raise CheckpointError("the file lacks rope_freqs.weight")
    if "rope_type" in values["rope_parameters"]:
        raise CheckpointError("gemma4.rope.scaling.factor and its type are not computed here")
    rotated = int((factors == 1).sum()) / max(1, len(factors))
    rope = values["rope_parameters"]
    values["rope_parameters"] = {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": rotated, **rope},
        SLIDING: {"rope_type": "default", "rope_theta": values.pop("rope_theta_swa")},
    }


GGUF = Gguf(
    "gemma4",
    None,
    names={
        **DENSE_NAMES,
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "router.proj.": "ffn_gate_inp.",
        "post_attention_layernorm.": "post_attention_norm.",
        "pre_feedforward_layernorm.": "ffn_norm.",
        "pre_feedforward_layernorm_2.": "pre_ffw_norm_2.",
        "post_feedforward_layernorm.": "post_ffw_norm.",
        "post_feedforward_layernorm_1.": "post_ffw_norm_1.",
        "post_feedforward_layernorm_2.": "post_ffw_norm_2.",
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate.": "inp_gate.",
        "per_layer_projection.": "proj.",
        "post_per_layer_input_norm.": "post_norm.",
    },
    outside={
        "model.embed_tokens_per_layer.": "per_layer_token_embd.",
        "model.per_layer_model_projection.": "per_layer_model_proj.",
        "model.per_layer_projection_norm.": "per_layer_proj_norm.",
    },
    keys={
        **KEYS,
        PATTERN: "",
        **dict.fromkeys(("attention.value_length", "attention.value_length_swa"), ""),
        **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), ""),
    },
    missing={
        **{"enable_moe_block": True, "num_kv_shared_layers": 0},
        SOFTCAP: 30.0,  # of llama.cpp, whose graph takes 0 for none
    },
    needs=tuple(key for key in (*KEYS, PATTERN) if key not in (SOFTCAP, "attention.shared_kv_layers")),
    fixed={"enable_moe_block": True, "hidden_activation": "gelu_pytorch_tanh"},
    kinds=_kinds,
    facts=_facts,
    factors=_factors,
    refused=_refused,
    finish=_finish,
)

FAMILY = Family(
    name="gemma4_text",
    holds=("gemma4_text",),
    files=Layout(
        gate="router.proj",
        gate_scales=("router.scale", "router.per_expert_scale"),
        place="experts",
    ),
    gates=("NormedGate",),
    activation_key="hidden_activation",
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "top_k_experts",
        "rms_eps": "rms_norm_eps",
    },
    fixed={"normalize": True},
    layers=as_configured,
    gguf=GGUF,
)
