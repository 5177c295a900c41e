"""Family (family.py) of DeepSeek-V2 and V2-Lite; its variants: of DeepSeek-OCR 2 and Unlimited-OCR."""

from fmoe_ext.checkpoint.families.family import (
    PROJECTIONS,
    Family,
    Layout,
    Values,
    first_dense,
    kinds_of_layers,
)


def _read(values: Values) -> Values:
    """Set groups to one, unless topk_method uses them: "greedy" ignores them."""
    greedy = values.get("topk_method", "greedy") == "greedy"
    return {**values, "n_group": 1, "topk_group": 1} if greedy else values


_FAMILY = Family(
    name="deepseek_v2",
    holds=("deepseek_v2",),
    files=Layout(per_expert=PROJECTIONS, shared="shared_experts."),
    gates=("SoftmaxGate",),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "num_shared": "n_shared_experts",
        "top_k": "num_experts_per_tok",
        "scale": "routed_scaling_factor",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
    },
    fixed={"normalize": False, "group_best": 1},
    layers=first_dense,
    extra=lambda values, facts: {
        "topk_method": "greedy" if facts["num_groups"] == 1 else "group_limited_greedy"
    },
    read=_read,
)

FAMILIES = (
    _FAMILY,
    _FAMILY.variant("deepseek_ocr2_text", layers=kinds_of_layers),
    _FAMILY.variant("unlimited_ocr_text", layers=kinds_of_layers),
)
