"""GPT-OSS: biases everywhere, a clamped activation, gate and up in turn."""

from fmoe_ext.checkpoint.families.family import CLAMPED, Family, Layout

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
)
