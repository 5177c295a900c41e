"""GPT-OSS: biases everywhere, a clamped activation, gate and up in turn."""

from fmoe_ext.checkpoint.families.family import CLAMPED, Family, Gguf, Layout

FAMILY = Family(
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
    gguf=Gguf(
        "gpt-oss",
        None,
        biases=True,
        names={
            "mlp.router.": "ffn_gate_inp.",
            "post_attention_layernorm.": "post_attention_norm.",
            "self_attn.sinks": "attn_sinks.weight",
        },
        keys={"attention.sliding_window": "sliding_window"},
        needs=("attention.sliding_window",),
        window_period=2,
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        rounds_yarn=False,
    ),
)
