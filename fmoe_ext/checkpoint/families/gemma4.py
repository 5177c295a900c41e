"""Gemma 4: the router sees the tokens before the norm of the experts, which are beside a dense MLP."""

from fmoe_ext.checkpoint.families.family import Family, Layout, as_configured

FAMILY = Family(
    name="gemma4_text",
    holds=("gemma4_text",),
    files=Layout(
        gate="router.proj", gate_scales=("router.scale", "router.per_expert_scale"), place="experts"
    ),
    gates=("NormedGate",),
    activation_key="hidden_activation",
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "top_k_experts",
        "rms_eps": "rms_norm_eps",
    },
    fixed={"normalize": True},
    layers=as_configured,
)
