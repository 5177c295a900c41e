"""Family (family.py) of Qwen3-MoE and its variants; it also holds dense Qwen3 models whose MLPs became MoE layers."""

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import (
    PROJECTIONS,
    Family,
    Layout,
    Values,
    any_dense,
    kinds_of_layers,
    nothing_more,
)


def _windows(values: Values, facts: Values) -> Values:
    """Say whether all layers have a sliding window; CheckpointError if some do and others do not."""
    kinds = set(values.get("layer_types") or ())
    if len(kinds) > 1:
        raise CheckpointError(
            "config.layer_types has sliding and full attention, but the layers of qwen3_moe all have one of them"
        )
    return {"use_sliding_window": kinds == {"sliding_attention"}} if kinds else {}


_FAMILY = Family(
    name="qwen3_moe",
    holds=("qwen3_moe", "qwen3"),
    files=Layout(per_expert=PROJECTIONS),
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={"norm_topk_prob": False},
    layers=any_dense,
    extra=_windows,
)

FAMILIES = (
    _FAMILY,
    _FAMILY.variant("mellum", defaults={}, layers=kinds_of_layers, extra=nothing_more),  # Mellum 2
    _FAMILY.variant("qwen3_omni_moe_text", extra=nothing_more),  # of the thinker
    _FAMILY.variant(  # the language model of Qwen3-VL; weights are always normalised
        "qwen3_vl_moe_text",
        files=Layout(transposed=True),
        modules=Layout(),
        config={fact: key for fact, key in _FAMILY.config.items() if fact != "normalize"},
        fixed={"normalize": True},
        defaults={},
        extra=nothing_more,
    ),
)
