"""Families (family.py) like DeepSeek-V3: a sigmoid router with a bias, shared experts, groups; Kimi K2, GLM-4.5, ..."""

from dataclasses import replace
from types import MappingProxyType

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import (
    LIMITED,
    PROJECTIONS,
    Family,
    Layout,
    Values,
    as_configured,
    every_layer,
    first_dense,
    kinds_of_layers,
)


def _no_groups(values: Values) -> Values:
    """Refuse groups of experts: A.X-K2 uses them in another way."""
    if values.get("n_group") not in (None, 1):
        raise CheckpointError(
            f"config.n_group={values['n_group']}: axk2 lets experts outside of the chosen groups compete with score 0"
        )
    return {**values, "n_group": 1, "topk_group": 1}


_FAMILY = Family(
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
    fixed={"group_best": 2},  # a group's score is the sum of its two best experts
    layers=first_dense,
)

# The same facts by the names of Kimi Linear and Ling
_KIMI = MappingProxyType(
    {
        **_FAMILY.config,
        **{"num_experts": "num_experts", "num_shared": "num_shared_experts"},
        **{
            "top_k": "num_experts_per_token",
            "normalize": "moe_renormalize",
            "num_groups": "num_expert_group",
        },
    }
)
# Softmax instead of sigmoid, without a bias
_MISTRAL_4 = replace(
    _FAMILY,
    name="mistral4",
    holds=("mistral4",),
    files=replace(_FAMILY.files, expert_bias=""),
    gates=("SoftmaxGate",),
)
# The shared experts' gate and up are not clamped
_HUNYUAN_4 = replace(
    _FAMILY,
    name="hy_v4",
    holds=("hy_v4",),
    activations=(LIMITED,),
    shared_activation="swiglu",
    config={**_FAMILY.config, "swiglu_limit": "swiglu_limit"},
    layers=kinds_of_layers,
    unsupported={"hidden_act": "silu"},
)

FAMILIES = (
    _FAMILY,
    _FAMILY.variant("axk1", norm="post_mlp_layernorm", layers=kinds_of_layers),  # A.X-K1
    _FAMILY.variant("axk2", layers=kinds_of_layers, read=_no_groups),  # A.X-K2
    _FAMILY.variant("bailing_hybrid", config=_KIMI, layers=kinds_of_layers),  # Ling and Ring
    _FAMILY.variant(  # without shared experts
        "beam",
        files=replace(_FAMILY.files, shared=""),
        config={
            **{fact: key for fact, key in _FAMILY.config.items() if fact != "num_shared"},
            "num_experts": "num_experts",
        },
        layers=kinds_of_layers,
    ),
    _FAMILY.variant("deepseek_v32", layers=kinds_of_layers),
    _FAMILY.variant("dots1"),
    _FAMILY.variant(  # K-EXAONE
        "exaone_moe",
        config={**_FAMILY.config, "num_experts": "num_experts", "num_shared": "num_shared_experts"},
        layers=kinds_of_layers,
    ),
    _FAMILY.variant("glm4_moe"),  # GLM-4.5 and GLM-4.6
    _FAMILY.variant("glm4_moe_lite", layers=kinds_of_layers),  # GLM-4.7-Flash
    _FAMILY.variant(  # the language model of GLM-5 with images
        "glm5_next_text",
        activations=(LIMITED,),
        config={**_FAMILY.config, "swiglu_limit": "swiglu_limit"},
        layers=kinds_of_layers,
        unsupported={"hidden_act": "silu"},
    ),
    _FAMILY.variant("glm4v_moe_text"),  # the language model of GLM-4.5V
    _FAMILY.variant("glm_moe_dsa", layers=kinds_of_layers),  # GLM-5
    _HUNYUAN_4,
    _HUNYUAN_4.variant("hy_v4_vl_text"),
    _FAMILY.variant("kimi_linear", config=_KIMI, layers=kinds_of_layers),  # Kimi Linear
    _FAMILY.variant(  # Hunyuan 3
        "hy_v3",
        files=replace(_FAMILY.files, gate="router.gate", shared="shared_mlp.", expert_bias="expert_bias"),
        modules=Layout(shared="shared_experts.", expert_bias="e_score_correction_bias"),
        config={
            **{"num_experts": "num_experts", "d_hidden": "moe_intermediate_size"},
            **{"num_shared": "num_shared_experts", "top_k": "num_experts_per_tok"},
            "scale": "router_scaling_factor",
        },
        fixed={"normalize": True},
        layers=kinds_of_layers,
    ),
    _FAMILY.variant(  # Trinity
        "afmoe",
        files=replace(_FAMILY.files, gate="router.gate", expert_bias="expert_bias"),
        config={
            **{"num_experts": "num_experts", "d_hidden": "moe_intermediate_size"},
            **{"num_shared": "num_shared_experts", "top_k": "num_experts_per_tok", "scale": "route_scale"},
        },
        fixed={"normalize": True},
        layers=as_configured,
    ),
    _FAMILY.variant(  # Laguna
        "laguna",
        files=replace(_FAMILY.files, shared="shared_expert.", expert_bias="experts.e_score_correction_bias"),
        modules=Layout(shared="shared_experts.", expert_bias="gate.e_score_correction_bias"),
        config={
            **{"num_experts": "num_experts", "d_hidden": "moe_intermediate_size"},
            **{"shared": "shared_expert_intermediate_size", "top_k": "num_experts_per_tok"},
            "scale": "moe_routed_scaling_factor",
        },
        fixed={"normalize": True},
        layers=kinds_of_layers,
        unsupported={"moe_router_logit_softcapping": 0},
    ),
    _MISTRAL_4,
    _MISTRAL_4.variant(  # the language model of Mistral Large 4
        "mistral_large4_text",
        config={fact: key for fact, key in _FAMILY.config.items() if fact != "normalize"},
        fixed={"normalize": True, "group_best": 2},
        layers=as_configured,
    ),
    _FAMILY.variant(  # without shared experts
        "mimo_v2_flash",
        files=replace(_FAMILY.files, shared=""),
        config={fact: key for fact, key in _FAMILY.config.items() if fact != "num_shared"},
        layers=kinds_of_layers,
    ),
    _FAMILY.variant("solar_open", layers=every_layer),
)
