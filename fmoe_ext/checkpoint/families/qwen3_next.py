"""Qwen3-Next."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, any_dense

FAMILY = Family(
    name="qwen3_next",
    holds=("qwen3_next",),
    files=Layout(per_expert=PROJECTIONS, shared="shared_expert.", shared_gate="shared_expert_gate.weight"),
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    layers=any_dense,
)
