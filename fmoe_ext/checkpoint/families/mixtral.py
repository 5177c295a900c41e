"""Mixtral 8x7B and 8x22B; Llama and Mistral models with MoE layers."""

from fmoe_ext.checkpoint.families.family import W1_W3_W2, Family, Layout

FAMILY = Family(
    name="mixtral",
    holds=("mixtral", "mistral", "llama"),
    files=Layout(block="block_sparse_moe", per_expert=W1_W3_W2),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
    unsupported={"router_jitter_noise": 0},
)

VARIANTS = (FAMILY.variant("minimax"),)  # MiniMax-Text-01
