"""The language model of Aria: experts [E, in, out]."""

from fmoe_ext.checkpoint.families.family import Family, Layout

FAMILY = Family(
    name="aria_text",
    holds=("aria_text",),
    files=Layout(
        gate="router",
        experts=("experts.fc1.weight", "experts.fc2.weight"),
        transposed=True,
        shared="shared_experts.",
    ),
    modules=Layout(gate="router", transposed=True, shared="shared_experts."),
    activations=("swiglu",),
    config={
        "num_experts": "moe_num_experts",
        "d_hidden": "intermediate_size",
        "num_shared": "moe_num_shared_experts",
        "top_k": "moe_topk",
    },
    fixed={"normalize": True},
    unsupported={"hidden_act": "silu", "mlp_bias": False},
)
