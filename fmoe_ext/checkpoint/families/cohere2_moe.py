"""Family (family.py) of Command A with experts: config.json names the router's scores, and may average the outputs."""

from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, Values, kinds_of_layers

_GATES = MappingProxyType({"softmax": "SoftmaxGate", "sigmoid": "SigmoidGate"})


def _read(values: Values) -> Values:
    """Resolve the gate and the scale of the output.

    Softmax is over the chosen logits only, so its weights always sum to 1. "average" is the mean of the shared and
    the routed experts' outputs: a scale of 0.5.
    """
    averages = values.get("num_shared_experts") and values["shared_expert_combination_strategy"] == "average"
    said = str(values["expert_selection_fn"])
    if said not in _GATES:
        raise CheckpointError(f"config.expert_selection_fn={said!r}: cohere2_moe has {' and '.join(_GATES)}")
    gate = _GATES[said]
    normalize = values["norm_topk_prob"] if gate == "SigmoidGate" else True
    scale = {"output_scale": 0.5} if averages else {}
    return {**values, "gate": gate, "norm_topk_prob": normalize, **scale}


_FAMILY = Family(
    name="cohere2_moe",
    holds=("cohere2_moe",),
    files=Layout(no_bias=True, per_expert=PROJECTIONS, shared="shared_experts."),
    gates=("SigmoidGate", "SoftmaxGate"),
    config={
        "num_experts": "num_experts",
        "d_hidden": "intermediate_size",
        "num_shared": "num_shared_experts",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
        "shared_expert_combination_strategy": "average",
    },
    layers=kinds_of_layers,
    read=_read,
    extra=lambda values, facts: {
        "expert_selection_fn": next(name for name, gate in _GATES.items() if gate == facts["gate"])
    },
    fewest_shared=0,
)

FAMILIES = (_FAMILY,)
