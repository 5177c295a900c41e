"""DeepSeek-V3 and Kimi K2, and the models that have its MoE layers."""

from dataclasses import replace

from fmoe_ext.checkpoint.families.family import (
    PROJECTIONS,
    Family,
    Layout,
    every_layer,
    first_dense,
    kinds_of_layers,
)

FAMILY = Family(
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
    fixed={"group_best": 2},
    layers=first_dense,
)

VARIANTS = (
    FAMILY.variant("deepseek_v32", layers=kinds_of_layers),
    FAMILY.variant("dots1"),
    FAMILY.variant(  # K-EXAONE
        "exaone_moe",
        config={**FAMILY.config, "num_experts": "num_experts", "num_shared": "num_shared_experts"},
        layers=kinds_of_layers,
    ),
    FAMILY.variant("glm4_moe"),  # GLM-4.5 and GLM-4.6
    FAMILY.variant("glm4_moe_lite", layers=kinds_of_layers),  # GLM-4.7-Flash
    FAMILY.variant("glm_moe_dsa", layers=kinds_of_layers),  # GLM-5
    FAMILY.variant("hy_v4", layers=kinds_of_layers),  # Hunyuan V4
    FAMILY.variant(  # without shared experts
        "mimo_v2_flash",
        files=replace(FAMILY.files, shared=""),
        config={fact: key for fact, key in FAMILY.config.items() if fact != "num_shared"},
        layers=kinds_of_layers,
    ),
    FAMILY.variant("solar_open", layers=every_layer),
)
