"""Names of tensors in GGUF and in Transformers."""

from types import MappingProxyType

from fmoe_ext.checkpoint.families.family import Family

# {name in Transformers: name in GGUF}, of tensors outside and inside of a layer.
OUTSIDE = MappingProxyType(
    {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
)
INSIDE = MappingProxyType(
    {
        "input_layernorm.": "attn_norm.",
        "self_attn.q_proj.": "attn_q.",
        "self_attn.k_proj.": "attn_k.",
        "self_attn.v_proj.": "attn_v.",
        "self_attn.o_proj.": "attn_output.",
        "self_attn.q_norm.": "attn_q_norm.",
        "self_attn.k_norm.": "attn_k_norm.",
        "post_attention_layernorm.": "ffn_norm.",
        "mlp.gate.": "ffn_gate_inp.",
        "mlp.shared_expert.gate_proj.": "ffn_gate_shexp.",
        "mlp.shared_expert.up_proj.": "ffn_up_shexp.",
        "mlp.shared_expert.down_proj.": "ffn_down_shexp.",
        "mlp.shared_expert_gate.": "ffn_gate_inp_shexp.",
    }
)


def names_outside(family: Family) -> dict[str, str]:
    """{name in Transformers outside of a layer: name in GGUF}."""
    assert family.gguf is not None
    return {**OUTSIDE, **family.gguf.outside}


def names_inside(family: Family) -> dict[str, str]:
    """{name in a layer of Transformers, its MoE layer called mlp: name in GGUF}; the family's own come first."""
    assert family.gguf is not None
    own = family.gguf.names
    return {**own, **{theirs: ours for theirs, ours in INSIDE.items() if theirs not in own}}


def in_transformers(name: str, family: Family) -> str | None:
    """Finds the name in Transformers' layer of a tensor in a block of GGUF; None for one that is not known."""
    block = family.in_modules.block
    if name == "exp_probs_b.bias":
        return f"{block}.{family.in_modules.expert_bias}" if family.in_modules.expert_bias else None
    for theirs, ours in names_inside(family).items():
        if name.startswith(ours):
            full = theirs + name.removeprefix(ours)
            return f"{block}.{full.removeprefix('mlp.')}" if full.startswith("mlp.") else full
    return None
