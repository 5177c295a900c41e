"""Kolibri: the bias that balances its experts is added to the logits."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, every_layer

FAMILY = Family(
    name="kolibri1",
    holds=("kolibri1",),
    files=Layout(
        per_expert=PROJECTIONS, shared="shared_experts.", expert_bias="gate.e_score_correction_bias"
    ),
    gates=("SigmoidGate",),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    fixed={"biased": "logits"},
    layers=every_layer,
)
