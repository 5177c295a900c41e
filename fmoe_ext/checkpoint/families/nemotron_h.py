"""Nemotron-H: experts without a gate, between projections to a narrower width."""

from fmoe_ext.checkpoint.families.family import UNGATED, UP_DOWN, Family, Layout, as_configured

_LAYOUT = Layout(
    block="mixer",
    expert_bias="gate.e_score_correction_bias",
    experts=("experts.up_proj", "experts.down_proj"),
    gated=False,
    shared="shared_experts.",
    shared_names=UP_DOWN,
    latent=("fc1_latent_proj", "fc2_latent_proj"),
)


FAMILY = Family(
    name="nemotron_h",
    holds=("nemotron_h",),
    files=_LAYOUT,
    modules=_LAYOUT,
    gates=("SigmoidGate",),
    activations=UNGATED,
    activation_key="mlp_hidden_act",
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "moe_shared_expert_intermediate_size",
        "latent_size": "moe_latent_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
    },
    fixed={"group_best": 2},
    unsupported={"mlp_bias": False},
    layers=as_configured,
)
