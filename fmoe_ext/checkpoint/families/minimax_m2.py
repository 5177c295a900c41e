"""MiniMax-M2 and the language model of MiniMax-M3."""

from fmoe_ext.checkpoint.families.family import CLAMPED, GATE_UP_DOWN, W1_W3_W2, Family, Layout, as_configured

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

VARIANTS = (
    FAMILY.variant(
        "minimax_m3_vl_text",
        modules=Layout(
            shared="shared_experts.", shared_names=GATE_UP_DOWN, expert_bias="gate.e_score_correction_bias"
        ),
        activations=(CLAMPED,),
        config={
            **FAMILY.config,
            **{"shared": "shared_intermediate_size", "scale": "routed_scaling_factor"},
            **{"swiglu_alpha": "swiglu_alpha", "swiglu_limit": "swiglu_limit"},
        },
        layers=as_configured,
    ),
)
