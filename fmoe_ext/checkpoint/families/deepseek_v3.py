"""DeepSeek-V3 and Kimi K2; GLM-4.5 to 4.7 and dots.llm1 have the same MoE layers."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, first_dense

FAMILY = Family(
    name="deepseek_v3",
    holds=("deepseek_v3",),
    files=Layout(
        per_expert=PROJECTIONS, shared="shared_experts.", expert_bias="gate.e_score_correction_bias"
    ),
    gates=("SigmoidGate",),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "num_shared": "n_shared_experts",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
    },
    fixed={"group_best": 2},
    layers=first_dense,
)
