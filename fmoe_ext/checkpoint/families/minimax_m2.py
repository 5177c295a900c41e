"""MiniMax-M2."""

from fmoe_ext.checkpoint.families.family import W1_W3_W2, Family, Layout

FAMILY = Family(
    name="minimax_m2",
    holds=("minimax_m2",),
    files=Layout(block="block_sparse_moe", per_expert=W1_W3_W2, expert_bias="e_score_correction_bias"),
    gates=("SigmoidGate",),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
    unsupported={"router_jitter_noise": 0},
)
