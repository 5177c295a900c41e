"""Nemotron-H: experts without a gate, between projections to a narrower width."""

from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import gguf_recurrent
from fmoe_ext.checkpoint.families.family import (
    SHARED_NAMES,
    UNGATED,
    UP_DOWN,
    Family,
    Gguf,
    Layout,
    Values,
    as_configured,
)

LAYOUT = Layout(
    block="mixer",
    expert_bias="gate.e_score_correction_bias",
    experts=("experts.up_proj", "experts.down_proj"),
    gated=False,
    shared="shared_experts.",
    shared_names=UP_DOWN,
    latent=("fc1_latent_proj", "fc2_latent_proj"),
)

# {key: attribute} of its Mamba-2 layers
OF_MAMBA = MappingProxyType(
    {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    }
)
WIDTHS = "feed_forward_length"  # of each layer, 0 for those without experts


def _kinds(said: Values, num_layers: int) -> list[str]:
    kinds = gguf_recurrent.kinds(said, num_layers, "linear_attention")
    return ["moe" if said[WIDTHS][i] else kind for i, kind in enumerate(kinds)]


def _facts(config: Any) -> dict[str, Any]:
    latent = {"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
    return {
        **{key: getattr(config, attribute) for key, attribute in OF_MAMBA.items()},
        **latent,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "attention.layer_norm_epsilon": float(config.layer_norm_epsilon),
        gguf_recurrent.HEADS: gguf_recurrent.heads_of(config),
        WIDTHS: [config.moe_intermediate_size if kind == "moe" else 0 for kind in config.layer_types],
    }


def _complete(values: dict[str, Any]) -> None:
    gguf_recurrent.complete_heads(values)
    widths, inner, heads = (values.pop(key) for key in ("intermediate_size", "inner_size", "mamba_num_heads"))
    if not isinstance(widths, list) or len(widths) < values["num_hidden_layers"]:
        raise CheckpointError(
            f"{WIDTHS} is {widths!r}, expected a list of {values['num_hidden_layers']} entries"
        )
    if type(inner) is not int or type(heads) is not int or heads < 1 or inner % heads:
        raise CheckpointError(f"ssm.inner_size is {inner!r}, no multiple of ssm.time_step_rank {heads!r}")
    values |= {"mamba_num_heads": heads, "mamba_head_dim": inner // heads}


GGUF = Gguf(
    "nemotron_h_moe",
    None,
    turns_pairs=True,
    names={
        **SHARED_NAMES,
        **{f"mlp.{name}_proj.": f"attn_{name}." for name in "qkv"},
        "norm.": "attn_norm.",
        "mlp.o_proj.": "attn_output.",
        "mlp.in_proj.": "ssm_in.",
        "mlp.conv1d.bias": "ssm_conv1d.bias",
        "mlp.dt_bias": "ssm_dt.bias",
        "mlp.out_proj.": "ssm_out.",
        "mlp.fc1_latent_proj.": "ffn_latent_down.",
        "mlp.fc2_latent_proj.": "ffn_latent_up.",
    },
    outside={"model.embeddings.": "token_embd.", "model.norm_f.": "output_norm."},
    keys={
        **OF_MAMBA,
        "ssm.inner_size": "inner_size",
        "moe_latent_size": "moe_latent_size",
        "expert_weights_scale": "routed_scaling_factor",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        gguf_recurrent.HEADS: "num_key_value_heads",
        "rope.freq_base": None,  # there are no rotary embeddings
        "rope.dimension_count": None,
    },
    missing={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_latent_size": None},
    needs=(*OF_MAMBA, "ssm.inner_size", "attention.layer_norm_epsilon", gguf_recurrent.HEADS, WIDTHS),
    leaves_out_heads=True,
    fixed={"mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False, "mlp_bias": False},
    turned=gguf_recurrent.of_mamba("mixer.", lambda config: config.n_groups),
    kinds=_kinds,
    facts=_facts,
    complete=_complete,
)

FAMILY = Family(
    name="nemotron_h",
    holds=("nemotron_h",),
    files=LAYOUT,
    modules=LAYOUT,
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
    fixed={"group_best": 2},
    unsupported={"mlp_bias": False},
    layers=as_configured,
    gguf=GGUF,
)
