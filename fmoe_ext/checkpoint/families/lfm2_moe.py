"""LFM2 with experts."""

from fmoe_ext.checkpoint.families.family import W1_W3_W2, Family, Layout, as_configured

FAMILY = Family(
    name="lfm2_moe",
    holds=("lfm2_moe",),
    files=Layout(block="feed_forward", per_expert=W1_W3_W2, expert_bias="expert_bias"),
    modules=Layout(block="feed_forward", expert_bias="expert_bias"),
    gates=("SigmoidGate",),
    activations=("swiglu",),
    activation_key="",
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
    },
    fixed={"norm_eps": 1e-6},
    unsupported={"use_expert_bias": True},
    layers=as_configured,
)
