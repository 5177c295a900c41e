"""DeepSeek-V3 and Kimi K2, and the models that have its MoE layers."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import (
    DEEPSEEK2,
    DENSE_NAMES,
    GGUF_KEYS,
    GGUF_MISSING,
    LIMITED,
    PROJECTIONS,
    SHARED_NAMES,
    Family,
    Gguf,
    Layout,
    Values,
    as_configured,
    every_layer,
    first_dense,
    kinds_of_layers,
)
from fmoe_ext.checkpoint.families.gguf_kimi import KIMI_LINEAR


def _no_groups(values: Values) -> Values:
    if values.get("n_group") not in (None, 1):
        raise CheckpointError(
            f"config.n_group={values['n_group']}: axk2 lets experts outside of the chosen groups compete with score 0"
        )
    return {**values, "n_group": 1, "topk_group": 1}


PATTERN = "attention.sliding_window_pattern"


def _windows(said: Values, num_layers: int) -> list[str]:
    windows = said.get(PATTERN, [(i + 1) % 4 != 0 for i in range(num_layers)])
    if not isinstance(windows, list):
        raise TypeError(f"exaone-moe.{PATTERN} is {windows!r}, expected a list")
    return ["sliding_attention" if windows[i] else "full_attention" for i in range(num_layers)]


def _pattern(config: Any) -> dict[str, Any]:
    return {PATTERN: [kind == "sliding_attention" for kind in config.layer_types]}


# {key: attribute} of GLM-5's indexers, and the key that says which layers have one
OF_INDEXER = MappingProxyType(
    {
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
    }
)
TYPES = "attention.indexer.types"


def _indexer(config: Any) -> dict[str, Any]:
    return {
        **{key: getattr(config, attribute) for key, attribute in OF_INDEXER.items()},
        TYPES: [kind == "full" for kind in config.indexer_types],
    }


def _complete(values: dict[str, Any]) -> None:
    num_layers = values["num_hidden_layers"]
    types = values.get(
        "indexer_types", None if values["max_position_embeddings"] >= 2**20 else [True] * num_layers
    )
    if not isinstance(types, list) or len(types) < num_layers:
        raise CheckpointError(f"{TYPES} is {types!r}, expected a list of {num_layers} entries")
    values["indexer_types"] = ["full" if full else "shared" for full in types[:num_layers]]


GGUF = replace(
    DEEPSEEK2,
    keys={**DEEPSEEK2.keys, "expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
    missing={**DEEPSEEK2.missing, "num_mtp_layers": 0},
    leaves_out_heads=True,
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
    gguf=GGUF,
)

GLM4 = Gguf(
    "glm4moe",
    None,
    biases=True,
    names={**SHARED_NAMES, **DENSE_NAMES, "post_attention_layernorm.": "post_attention_norm."},
    keys=GGUF_KEYS,
    missing={**GGUF_MISSING, "num_mtp_layers": 0},
    flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
    is_partial=True,
    leaves_out_heads=True,
)
KIMI = MappingProxyType(
    {
        **FAMILY.config,
        **{
            "num_experts": "num_experts",
            "num_shared": "num_shared_experts",
            "top_k": "num_experts_per_token",
        },
        **{"normalize": "moe_renormalize", "num_groups": "num_expert_group"},
    }
)
# Softmax instead of sigmoid, without a bias
MISTRAL_4 = replace(
    FAMILY,
    name="mistral4",
    holds=("mistral4",),
    gguf=None,
    files=replace(FAMILY.files, expert_bias=""),
    gates=("SoftmaxGate",),
)
# The shared experts' gate and up are not clamped
HUNYUAN_4 = replace(
    FAMILY,
    name="hy_v4",
    holds=("hy_v4",),
    gguf=None,
    activations=(LIMITED,),
    shared_activation="swiglu",
    config={**FAMILY.config, "swiglu_limit": "swiglu_limit"},
    layers=kinds_of_layers,
    unsupported={"hidden_act": "silu"},
)

VARIANTS = (
    FAMILY.variant("axk1", norm="post_mlp_layernorm", layers=kinds_of_layers),  # A.X-K1
    FAMILY.variant("axk2", layers=kinds_of_layers, read=_no_groups),  # A.X-K2
    FAMILY.variant("bailing_hybrid", config=KIMI, layers=kinds_of_layers),  # Ling and Ring
    FAMILY.variant(  # without shared experts
        "beam",
        files=replace(FAMILY.files, shared=""),
        config={
            **{fact: key for fact, key in FAMILY.config.items() if fact != "num_shared"},
            "num_experts": "num_experts",
        },
        layers=kinds_of_layers,
    ),
    FAMILY.variant("deepseek_v32", layers=kinds_of_layers),
    FAMILY.variant(
        "dots1",
        gguf=Gguf(
            "dots1",
            None,
            groups_heads=False,
            names={**SHARED_NAMES, **DENSE_NAMES},
            keys=GGUF_KEYS,
            missing={**GGUF_MISSING, "sliding_window": None},
            needs=("expert_gating_func",),
        ),
    ),
    FAMILY.variant(  # K-EXAONE
        "exaone_moe",
        config={**FAMILY.config, "num_experts": "num_experts", "num_shared": "num_shared_experts"},
        layers=kinds_of_layers,
        gguf=Gguf(
            "exaone-moe",
            None,
            names={**SHARED_NAMES, **DENSE_NAMES},
            keys={**GGUF_KEYS, "attention.sliding_window": "sliding_window", PATTERN: ""},
            missing=GGUF_MISSING,
            needs=("expert_gating_func", "attention.sliding_window"),
            leaves_out_heads=True,
            fixed={"tie_word_embeddings": False},
            kinds=_windows,
            facts=_pattern,
        ),
    ),
    FAMILY.variant(  # GLM-4.5 and GLM-4.6
        "glm4_moe",
        gguf=GLM4,
    ),
    FAMILY.variant("glm4_moe_lite", layers=kinds_of_layers, gguf=GGUF),  # GLM-4.7-Flash
    FAMILY.variant(  # the language model of GLM-5 with images
        "glm5_next_text",
        activations=(LIMITED,),
        config={**FAMILY.config, "swiglu_limit": "swiglu_limit"},
        layers=kinds_of_layers,
        unsupported={"hidden_act": "silu"},
    ),
    FAMILY.variant("glm4v_moe_text"),  # the language model of GLM-4.5V
    FAMILY.variant(  # GLM-5
        "glm_moe_dsa",
        layers=kinds_of_layers,
        gguf=replace(
            GGUF,
            name="glm-dsa",
            names={
                **GGUF.names,
                "self_attn.indexer.wq_b.": "indexer.attn_q_b.",
                "self_attn.indexer.wk.": "indexer.attn_k.",
                "self_attn.indexer.k_norm.": "indexer.k_norm.",
                "self_attn.indexer.weights_proj.": "indexer.proj.",
            },
            keys={**GGUF.keys, **OF_INDEXER, TYPES: "indexer_types"},
            missing=DEEPSEEK2.missing,
            needs=(*DEEPSEEK2.needs[1:], *OF_INDEXER),
            facts=_indexer,
            complete=_complete,
        ),
    ),
    HUNYUAN_4,
    HUNYUAN_4.variant("hy_v4_vl_text"),
    FAMILY.variant("kimi_linear", config=KIMI, layers=kinds_of_layers, gguf=KIMI_LINEAR),  # Kimi Linear
    FAMILY.variant(  # Hunyuan 3
        "hy_v3",
        files=replace(FAMILY.files, gate="router.gate", shared="shared_mlp.", expert_bias="expert_bias"),
        modules=Layout(shared="shared_experts.", expert_bias="e_score_correction_bias"),
        config={
            **{"num_experts": "num_experts", "d_hidden": "moe_intermediate_size"},
            **{"num_shared": "num_shared_experts", "top_k": "num_experts_per_tok"},
            "scale": "router_scaling_factor",
        },
        fixed={"normalize": True},
        layers=kinds_of_layers,
    ),
    FAMILY.variant(  # Trinity
        "afmoe",
        files=replace(FAMILY.files, gate="router.gate", expert_bias="expert_bias"),
        config={
            **{"num_experts": "num_experts", "d_hidden": "moe_intermediate_size"},
            **{"num_shared": "num_shared_experts", "top_k": "num_experts_per_tok", "scale": "route_scale"},
        },
        fixed={"normalize": True},
        layers=as_configured,
        gguf=Gguf(
            "afmoe",
            None,
            names={
                **SHARED_NAMES,
                **DENSE_NAMES,
                "mlp.router.gate.": "ffn_gate_inp.",
                "self_attn.gate_proj.": "attn_gate.",
                "post_attention_layernorm.": "post_attention_norm.",
                "pre_mlp_layernorm.": "ffn_norm.",
                "post_mlp_layernorm.": "post_ffw_norm.",
            },
            keys={
                "leading_dense_block_count": "num_dense_layers",
                "expert_weights_scale": "route_scale",
                "attention.sliding_window": "sliding_window",
            },
            missing={"num_dense_layers": 0, "route_scale": 1.0, "mup_enabled": True},
            needs=("expert_weights_norm", "attention.sliding_window"),
            window_period=4,
            fixed={"mup_enabled": True},
        ),
    ),
    FAMILY.variant(  # Laguna
        "laguna",
        files=replace(FAMILY.files, shared="shared_expert.", expert_bias="experts.e_score_correction_bias"),
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
    MISTRAL_4,
    MISTRAL_4.variant(  # the language model of Mistral Large 4
        "mistral_large4_text",
        config={fact: key for fact, key in FAMILY.config.items() if fact != "normalize"},
        fixed={"normalize": True, "group_best": 2},
        layers=as_configured,
    ),
    FAMILY.variant(  # without shared experts
        "mimo_v2_flash",
        files=replace(FAMILY.files, shared=""),
        config={fact: key for fact, key in FAMILY.config.items() if fact != "num_shared"},
        layers=kinds_of_layers,
    ),
    FAMILY.variant(
        "solar_open",
        layers=every_layer,
        gguf=replace(GLM4, keys={"expert_weights_scale": GGUF_KEYS["expert_weights_scale"]}),
    ),
)
