"""LFM2 with experts."""

from typing import Any

from fmoe_ext.checkpoint.families import gguf_recurrent
from fmoe_ext.checkpoint.families.family import W1_W3_W2, Family, Gguf, Layout, Values, as_configured


def _kinds(said: Values, num_layers: int) -> list[str]:
    return gguf_recurrent.kinds(said, num_layers, "conv")


def _facts(config: Any) -> dict[str, Any]:
    return {
        gguf_recurrent.HEADS: gguf_recurrent.heads_of(config),
        "shortconv.l_cache": config.conv_L_cache,
    }


FAMILY = Family(
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
    gguf=Gguf(
        "lfm2moe",
        None,
        names={
            "operator_norm.": "attn_norm.",
            "ffn_norm.": "ffn_norm.",
            "self_attn.out_proj.": "attn_output.",
            "self_attn.q_layernorm.": "attn_q_norm.",
            "self_attn.k_layernorm.": "attn_k_norm.",
            "conv.in_proj.": "shortconv.in_proj.",
            "conv.out_proj.": "shortconv.out_proj.",
            "mlp.w1.": "ffn_gate.",
            "mlp.w3.": "ffn_up.",
            "mlp.w2.": "ffn_down.",
        },
        outside={"model.embedding_norm.": "token_embd_norm."},
        keys={
            "attention.layer_norm_rms_epsilon": "norm_eps",
            gguf_recurrent.HEADS: "num_key_value_heads",
            "leading_dense_block_count": "num_dense_layers",
            "expert_weights_norm": "norm_topk_prob",
            "shortconv.l_cache": "conv_L_cache",
        },
        missing={"num_dense_layers": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        needs=("shortconv.l_cache", gguf_recurrent.HEADS),
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "conv_bias": False},
        turned=(gguf_recurrent.convolution("conv.conv.weight", "shortconv.conv.weight"),),
        kinds=_kinds,
        facts=_facts,
        complete=gguf_recurrent.complete_heads,
    ),
)
