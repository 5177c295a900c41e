"""Granite 3 MoE; Granite models with MoE layers."""

from dataclasses import replace
from typing import Any

import torch

from fmoe_ext.checkpoint.families.family import Family, Gguf, Layout, Turned

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
        Turned(
            "shared_mlp.input_linear.weight",
            ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
            lambda config, *parts: torch.cat(parts),
            lambda config, w: w.chunk(2),
            True,
        ),
    ),
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
    FAMILY.variant("granitemoehybrid"),  # Granite 4, with Mamba layers and a shared MLP of its own
    FAMILY.variant("granitemoeshared", gguf=SHARED),  # a shared MLP of its own beside the MoE layer
)
