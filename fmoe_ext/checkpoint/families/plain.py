"""Model types of Transformers whose MoE layers are described by data alone, for import, export and checkpoints.

__init__.py collects FAMILIES; a family with rules in code has a file of its own. family.py explains the fields: files
and modules say what tensors are called, config where config.json has a layer's facts, holds which dense models can be
exported as this one.
"""

from fmoe_ext.checkpoint.families.family import (
    CLAMPED,
    GATE_UP_DOWN,
    LIMITED,
    PROJECTIONS,
    SOFTCAPPED,
    UNGATED,
    UP_DOWN,
    W1_W3_W2,
    Family,
    Layout,
    as_configured,
    every_layer,
)

# The language model of Aria: experts [E, in, out]
_ARIA_TEXT = Family(
    name="aria_text",
    holds=("aria_text",),
    files=Layout(
        gate="router",
        experts=("experts.fc1.weight", "experts.fc2.weight"),
        transposed=True,
        shared="shared_experts.",
    ),
    modules=Layout(gate="router", transposed=True, shared="shared_experts."),
    activations=("swiglu",),
    config={
        "num_experts": "moe_num_experts",
        "d_hidden": "intermediate_size",
        "num_shared": "moe_num_shared_experts",
        "top_k": "moe_topk",
    },
    fixed={"normalize": True},
    unsupported={"hidden_act": "silu", "mlp_bias": False},
)

# DeepSeek-V4: in the first layers a table of the vocabulary chooses the experts
_DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    holds=("deepseek_v4",),
    files=Layout(
        block="ffn",
        per_expert=("w1.weight", "w3.weight", "w2.weight"),
        expert_bias="gate.bias",
        table="gate.tid2eid",
    ),
    modules=Layout(
        shared="shared_experts.",
        shared_names=PROJECTIONS,
        expert_bias="gate.e_score_correction_bias",
        table="gate.tid2eid",
    ),
    gates=("HashGate", "SqrtSoftplusGate"),
    activations=(LIMITED,),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "scale": "routed_scaling_factor",
        "swiglu_limit": "swiglu_limit",
    },
    fixed={"normalize": True},
    unsupported={"hidden_act": "silu", "scoring_func": "sqrtsoftplus", "mlp_bias": False},
    layers=as_configured,
)

# Gemma 4: the router sees the tokens before the experts' norm, and the experts are beside a dense MLP
_GEMMA4 = Family(
    name="gemma4_text",
    holds=("gemma4_text",),
    files=Layout(
        gate="router.proj", gate_scales=("router.scale", "router.per_expert_scale"), place="experts"
    ),
    gates=("NormedGate",),
    activation_key="hidden_activation",
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "top_k_experts",
        "rms_eps": "rms_norm_eps",
    },
    defaults={"hidden_activation": "gelu_pytorch_tanh"},
    fixed={"normalize": True},
    layers=as_configured,
)

# GPT-OSS: biases everywhere, a clamped activation, rows gate, up, gate, up, ...
_GPT_OSS = Family(
    name="gpt_oss",
    holds=("gpt_oss",),
    files=Layout(gate="router", interleaved=True),
    gate_bias=True,
    activations=(CLAMPED,),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    },
    fixed={"normalize": True},
    returns_scores=True,
)

# Granite 3 MoE; Granite models with MoE layers. Granite 4 and others are variants (FAMILIES)
_GRANITEMOE = Family(
    name="granitemoe",
    holds=("granitemoe", "granite"),
    files=Layout(
        block="block_sparse_moe", gate="router.layer", experts=("input_linear.weight", "output_linear.weight")
    ),
    modules=Layout(block="block_sparse_moe", gate="router"),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
)

# Inkling 2: experts whose gate and up are bounded by tanh
_INKLING2 = Family(
    name="inkling2_text",
    holds=("inkling2_text",),
    files=Layout(expert_bias="gate.e_score_correction_bias"),
    gates=("SigmoidGate",),
    activations=(SOFTCAPPED,),
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "scale": "route_scale",
        "gate_softcap": "mlp_gate_softcap",
        "up_softcap": "mlp_up_softcap",
    },
    fixed={"normalize": True},
    unsupported={"scoring_func": "sigmoid"},
    layers=as_configured,
)

# Jamba: some layers have experts, in turn with dense ones
_JAMBA = Family(
    name="jamba",
    holds=("jamba",),
    files=Layout(block="feed_forward", gate="router", per_expert=PROJECTIONS),
    modules=Layout(block="feed_forward", gate="router"),
    config={"num_experts": "num_experts", "d_hidden": "intermediate_size", "top_k": "num_experts_per_tok"},
    fixed={"normalize": False},
    layers=as_configured,
)

# Kolibri: the bias that balances its experts is added to the logits
_KOLIBRI1 = Family(
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

# LFM2 with experts
_LFM2_MOE = Family(
    name="lfm2_moe",
    holds=("lfm2_moe",),
    files=Layout(block="feed_forward", per_expert=W1_W3_W2, expert_bias="expert_bias"),
    modules=Layout(block="feed_forward", expert_bias="expert_bias"),
    gates=("SigmoidGate",),
    activations=("swiglu",),
    activation_key="",
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
    },
    fixed={"norm_eps": 1e-6},
    unsupported={"use_expert_bias": True},
    layers=as_configured,
)

# MiniMax-M2; the language model of MiniMax-M3 is a variant (FAMILIES)
_MINIMAX_M2 = Family(
    name="minimax_m2",
    holds=("minimax_m2",),
    files=Layout(block="block_sparse_moe", per_expert=W1_W3_W2, expert_bias="e_score_correction_bias"),
    gates=("SigmoidGate",),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
    unsupported={"router_jitter_noise": 0},
)

# Mixtral 8x7B and 8x22B; Llama and Mistral models with MoE layers
_MIXTRAL = Family(
    name="mixtral",
    holds=("mixtral", "mistral", "llama"),
    files=Layout(block="block_sparse_moe", per_expert=W1_W3_W2),
    config={
        "num_experts": "num_local_experts",
        "d_hidden": "intermediate_size",
        "top_k": "num_experts_per_tok",
    },
    fixed={"normalize": True},
    unsupported={"router_jitter_noise": 0},
)

# Nemotron-H: experts without a gate, between projections to a narrower width
_NEMOTRON_H_LAYOUT = Layout(
    block="mixer",
    expert_bias="gate.e_score_correction_bias",
    experts=("experts.up_proj", "experts.down_proj"),
    gated=False,
    shared="shared_experts.",
    shared_names=UP_DOWN,
    latent=("fc1_latent_proj", "fc2_latent_proj"),
)

_NEMOTRON_H = Family(
    name="nemotron_h",
    holds=("nemotron_h",),
    files=_NEMOTRON_H_LAYOUT,
    modules=_NEMOTRON_H_LAYOUT,
    gates=("SigmoidGate",),
    activations=UNGATED,
    activation_key="mlp_hidden_act",
    config={
        "num_experts": "n_routed_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "moe_shared_expert_intermediate_size",
        "latent_size": "moe_latent_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
    },
    defaults={"mlp_hidden_act": "relu2"},
    fixed={"group_best": 2},  # a group's score is the sum of its two best experts
    unsupported={"mlp_bias": False},
    layers=as_configured,
)

# OLMoE and FlexOlmo
_OLMOE = Family(
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

FAMILIES = (
    _ARIA_TEXT,
    _DEEPSEEK_V4,
    _GEMMA4,
    _GPT_OSS,
    _GRANITEMOE,
    _GRANITEMOE.variant("granitemoe_swa"),  # with sliding windows
    _GRANITEMOE.variant("granitemoehybrid"),  # Granite 4, with Mamba layers and a shared MLP of its own
    _GRANITEMOE.variant("granitemoeshared"),  # a shared MLP of its own beside the MoE layer
    _INKLING2,
    _INKLING2.variant("inkling2_loop_text"),
    _JAMBA,
    _KOLIBRI1,
    _LFM2_MOE,
    _MINIMAX_M2,
    _MINIMAX_M2.variant(
        "minimax_m3_vl_text",
        modules=Layout(
            shared="shared_experts.", shared_names=GATE_UP_DOWN, expert_bias="gate.e_score_correction_bias"
        ),
        activations=(CLAMPED,),
        config={
            **_MINIMAX_M2.config,
            "shared": "shared_intermediate_size",
            "scale": "routed_scaling_factor",
            "swiglu_alpha": "swiglu_alpha",
            "swiglu_limit": "swiglu_limit",
        },
        layers=as_configured,
    ),
    _MIXTRAL,
    _MIXTRAL.variant("minimax"),  # MiniMax-Text-01
    _NEMOTRON_H,
    _OLMOE,
    _OLMOE.variant("flex_olmo", holds=("flex_olmo", "olmo2")),  # OLMo-2 models with MoE layers
)
