"""Family (family.py) of Qwen2-MoE and its variants: shared experts, most with a gate.

It also holds dense Qwen2, Mistral and Llama models whose MLPs became such layers.
"""

from dataclasses import replace

from fmoe_ext.checkpoint.families.family import (
    PROJECTIONS,
    Family,
    Layout,
    any_dense,
    every_layer,
    nothing_more,
)

_FAMILY = Family(
    name="qwen2_moe",
    holds=("qwen2_moe", "qwen2", "mistral", "llama"),
    files=Layout(per_expert=PROJECTIONS, shared="shared_expert.", shared_gate="shared_expert_gate.weight"),
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={"norm_topk_prob": False},
    layers=any_dense,
    # among the dense models only Qwen2's have biases of queries, keys and values
    extra=lambda values, facts: (
        {} if values["model_type"] == "qwen2_moe" else {"qkv_bias": values["model_type"] == "qwen2"}
    ),
)

FAMILIES = (
    _FAMILY,
    _FAMILY.variant(  # Flint: sigmoid without a bias, shared experts without a gate
        "flint",
        files=replace(_FAMILY.files, shared_gate="", no_bias=True),
        gates=("SigmoidGate",),
        defaults={},
        extra=nothing_more,
    ),
    _FAMILY.variant(  # Lara Mini: shared experts without a gate
        "lara_mini",
        files=replace(_FAMILY.files, shared_gate=""),
        defaults={},
        layers=every_layer,
        extra=nothing_more,
    ),
    _FAMILY.variant("qwen3_next", defaults={"norm_topk_prob": True}, extra=nothing_more),
    _FAMILY.variant(  # the language model of Qwen3.5 and 3.6; weights are always normalised
        "qwen3_5_moe_text",
        files=replace(_FAMILY.files, per_expert=None),
        config={fact: key for fact, key in _FAMILY.config.items() if fact != "normalize"},
        fixed={"normalize": True},
        defaults={},
        layers=every_layer,
        extra=nothing_more,
    ),
    _FAMILY.variant(  # the language model of Qwen4 (experimental)
        "qwen4_exp_text",
        files=replace(_FAMILY.files, per_expert=None),
        defaults={"norm_topk_prob": True},
        layers=every_layer,
        extra=nothing_more,
    ),
)
