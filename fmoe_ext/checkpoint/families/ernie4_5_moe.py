"""Family (family.py) of ERNIE 4.5 MoE, which also holds dense ERNIE 4.5 models whose MLPs became MoE layers."""

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import PROJECTIONS, SOFTMAX, Family, Layout, Numbers, Values


def _one_range(name: str, moe: Numbers, dense: Numbers) -> Values:
    """Say the first and the last MoE layer; CheckpointError if a dense one is between them."""
    if moe != tuple(range(moe[0], moe[-1] + 1)):
        raise CheckpointError(f"{name} has its MoE layers side by side, but here they are {moe}")
    return {"moe_layer_start_index": moe[0], "moe_layer_end_index": moe[-1], "moe_layer_interval": 1}


_FAMILY = Family(
    name="ernie4_5_moe",
    holds=("ernie4_5_moe", "ernie4_5"),
    files=Layout(
        per_expert=PROJECTIONS,
        shared="shared_experts.",
        expert_bias="moe_statics.e_score_correction_bias",
        bias_is_row=True,
    ),
    modules=Layout(
        shared="shared_experts.", expert_bias="gate.moe_statics.e_score_correction_bias", bias_is_row=True
    ),
    gates=(*SOFTMAX, "BiasedSoftmaxGate"),
    config={
        "num_experts": "moe_num_experts",
        "d_hidden": "moe_intermediate_size",
        "num_shared": "moe_num_shared_experts",
        "top_k": "moe_k",
    },
    fixed={"normalize": True},
    layers=_one_range,
    fewest_shared=0,
)

FAMILIES = (_FAMILY,)
