"""OLMoE and FlexOlmo."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout

FAMILY = Family(
    name="olmoe",
    holds=("olmoe",),
    files=Layout(per_expert=PROJECTIONS),
    config={
        "num_experts": "num_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={"norm_topk_prob": False},
)

VARIANTS = (FAMILY.variant("flex_olmo", holds=("flex_olmo", "olmo2")),)  # OLMo-2 models with MoE layers
