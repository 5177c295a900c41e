"""GLM-4.7-Flash: GLM's router on DeepSeek's attention."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, Numbers, Values


def _kinds(name: str, moe: Numbers, dense: Numbers) -> Values:
    return {"mlp_layer_types": ["sparse" if i in moe else "dense" for i in sorted((*moe, *dense))]}


FAMILY = Family(
    name="glm4_moe_lite",
    holds=("glm4_moe_lite",),
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
    layers=_kinds,
)
