"""Inkling 2: experts whose gate and up are bounded by tanh."""

from fmoe_ext.checkpoint.families.family import SOFTCAPPED, Family, Layout, as_configured

FAMILY = Family(
    name="inkling2_text",
    holds=("inkling2_text",),
    files=Layout(expert_bias="gate.e_score_correction_bias"),
    gates=("SigmoidGate",),
    activations=(SOFTCAPPED,),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "scale": "route_scale",
        "gate_softcap": "mlp_gate_softcap",
        "up_softcap": "mlp_up_softcap",
    },
    fixed={"normalize": True},
    unsupported={"scoring_func": "sigmoid"},
    layers=as_configured,
)

VARIANTS = (FAMILY.variant("inkling2_loop_text"),)
