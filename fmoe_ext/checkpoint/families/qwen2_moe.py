"""Qwen2-MoE; Qwen2, Mistral and Llama models with MoE layers and gated shared experts."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Gguf, Layout, Values, any_dense


def _attention_bias(values: Values, facts: Values) -> Values:
    return {"qkv_bias": values["model_type"] == "qwen2"} if values["model_type"] != "qwen2_moe" else {}


FAMILY = Family(
    name="qwen2_moe",
    holds=("qwen2_moe", "qwen2", "mistral", "llama"),
    files=Layout(per_expert=PROJECTIONS, shared="shared_expert.", shared_gate="shared_expert_gate.weight"),
    config={
        "num_experts": "num_experts",
        "d_hidden": "moe_intermediate_size",
        "shared": "shared_expert_intermediate_size",
        "top_k": "num_experts_per_tok",
        "normalize": "norm_topk_prob",
    },
    defaults={"norm_topk_prob": False},
    layers=any_dense,
    extra=_attention_bias,
    gguf=Gguf("qwen2moe", normalizes=False, biases=True),
)
