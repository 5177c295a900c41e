"""FlexOlmo; OLMo-2 models with MoE layers."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout

FAMILY = Family(
    name="flex_olmo",
    holds=("flex_olmo", "olmo2"),
    files=Layout(per_expert=PROJECTIONS),
    config={
        "num_experts": "num_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={"norm_topk_prob": False},
)
