"""DeepSeek-V4: experts by a table of the vocabulary in the first layers."""

from fmoe_ext.checkpoint.families.family import LIMITED, PROJECTIONS, Family, Layout, as_configured

FAMILY = Family(
    name="deepseek_v4",
    holds=("deepseek_v4",),
    files=Layout(
        block="ffn",
        per_expert=("w1.weight", "w3.weight", "w2.weight"),
        expert_bias="gate.bias",
        table="gate.tid2eid",
    ),
    modules=Layout(
        shared="shared_experts.",
        shared_names=PROJECTIONS,
        expert_bias="gate.e_score_correction_bias",
        table="gate.tid2eid",
    ),
    gates=("HashGate", "SqrtSoftplusGate"),
    activations=(LIMITED,),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "scale": "routed_scaling_factor",
        "swiglu_limit": "swiglu_limit",
    },
    fixed={"normalize": True},
    unsupported={"hidden_act": "silu", "scoring_func": "sqrtsoftplus", "mlp_bias": False},
    layers=as_configured,
)
