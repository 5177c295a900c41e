"""Granite 3 MoE; Granite models with MoE layers."""

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import gguf_recurrent
from fmoe_ext.checkpoint.families.family import Family, Gguf, Layout, TensorTransform, Values

GGUF = Gguf(
    "granitemoe",
    None,
    turns_pairs=True,
    names={"mlp.router.": "ffn_gate_inp."},
    multipliers={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    missing={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    needs=("attention.scale",),
)
WIDTH = "expert_shared_feed_forward_length"


def _shared_facts(config: Any) -> dict[str, Any]:
    return {WIDTH: config.shared_intermediate_size} if config.shared_intermediate_size else {}


SHARED = replace(
    GGUF,
    names={**GGUF.names, "shared_mlp.output_linear.": "ffn_down_shexp."},
    keys={WIDTH: "shared_intermediate_size"},
    marks=(WIDTH,),
    facts=_shared_facts,
    turned=(
        TensorTransform(
            "shared_mlp.input_linear.weight",
            ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
            lambda config, *parts: torch.cat(parts),
            lambda config, w: w.chunk(2),
            True,
        ),
    ),
)

# {key: attribute} of Mamba-2 layers
OF_MAMBA = MappingProxyType(
    {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    }
)
ROPE = "rope.scaling.finetuned"  # a switch for rotary embeddings here


def _kinds(said: Values, num_layers: int) -> list[str]:
    return gguf_recurrent.kinds(said, num_layers, "linear_attention")


def _hybrid_facts(config: Any) -> dict[str, Any]:
    return {
        **_shared_facts(config),
        **{key: getattr(config, attribute) for key, attribute in OF_MAMBA.items()},
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        gguf_recurrent.HEADS: gguf_recurrent.heads_of(config),
        ROPE: config.position_embedding_type == "rope",
    }


def _complete(values: dict[str, Any]) -> None:
    gguf_recurrent.complete_heads(values)
    inner, size, heads = values.pop("inner_size"), values["hidden_size"], values["mamba_n_heads"]
    if any(type(n) is not int or n < 1 for n in (inner, size, heads)) or inner % size or inner % heads:
        raise CheckpointError(
            f"ssm.inner_size is {inner!r}, no multiple of embedding_length {size!r} and of ssm.time_step_rank {heads!r}"
        )
    values |= {"mamba_expand": inner // size, "mamba_d_head": inner // heads}
    if type(values["position_embedding_type"]) is not bool:
        raise CheckpointError(f"{ROPE} is {values['position_embedding_type']!r}, expected true or false")
    values["position_embedding_type"] = "rope" if values["position_embedding_type"] else None


HYBRID = replace(
    SHARED,
    name="granitehybrid",
    names={
        **SHARED.names,
        "mamba.in_proj.": "ssm_in.",
        "mamba.conv1d.bias": "ssm_conv1d.bias",
        "mamba.dt_bias": "ssm_dt.bias",
        "mamba.out_proj.": "ssm_out.",
    },
    keys={
        **SHARED.keys,
        **OF_MAMBA,
        "ssm.inner_size": "inner_size",
        gguf_recurrent.HEADS: "num_key_value_heads",
        ROPE: "position_embedding_type",
    },
    missing={**SHARED.missing, "position_embedding_type": True},
    needs=("attention.scale", *OF_MAMBA, "ssm.inner_size", gguf_recurrent.HEADS),
    marks=(),
    fixed={
        **{"mamba_n_groups": 1, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
        "time_step_limit": (0.0, math.inf),
    },
    turned=(
        *SHARED.turned,
        *gguf_recurrent.of_mamba("mamba.", lambda config: config.mamba_n_groups),
    ),
    kinds=_kinds,
    facts=_hybrid_facts,
    complete=_complete,
)

FAMILY = Family(
    name="granitemoe",
    holds=("granitemoe", "granite"),
    files=Layout(
        block="block_sparse_moe",
        gate="router.layer",
        experts=("input_linear.weight", "output_linear.weight"),
    ),
    modules=Layout(block="block_sparse_moe", gate="router"),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
    gguf=GGUF,
)

VARIANTS = (
    FAMILY.variant("granitemoe_swa"),  # with sliding windows
    FAMILY.variant(
        "granitemoehybrid", gguf=HYBRID
    ),  # Granite 4, with Mamba layers and a shared MLP of its own
    FAMILY.variant("granitemoeshared", gguf=SHARED),  # a shared MLP of its own beside the MoE layer
)
