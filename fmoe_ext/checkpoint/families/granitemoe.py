"""Granite 3 MoE; Granite models with MoE layers."""

from fmoe_ext.checkpoint.families.family import Family, Layout

FAMILY = Family(
    name="granitemoe",
    holds=("granitemoe", "granite"),
    files=Layout(
        block="block_sparse_moe", gate="router.layer", experts=("input_linear.weight", "output_linear.weight")
    ),
    modules=Layout(block="block_sparse_moe", gate="router"),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
)

VARIANTS = (
    FAMILY.variant("granitemoe_swa"),  # with sliding windows
    FAMILY.variant("granitemoehybrid"),  # Granite 4, with Mamba layers and a shared MLP of its own
    FAMILY.variant("granitemoeshared"),  # a shared MLP of its own beside the MoE layer
)
