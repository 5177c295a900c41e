"""Granite 3 MoE; Granite models with MoE layers."""

from fmoe_ext.checkpoint.families.family import Family, Gguf, Layout

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
    gguf=Gguf(
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
    ),
)

VARIANTS = (
    FAMILY.variant("granitemoe_swa"),  # with sliding windows
    FAMILY.variant("granitemoehybrid"),  # Granite 4, with Mamba layers and a shared MLP of its own
    FAMILY.variant("granitemoeshared"),  # a shared MLP of its own beside the MoE layer
)
