"""Kimi Linear in GGUF: latent attention without rotary embeddings, and layers of Kimi's delta attention."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.families import gguf_recurrent
from fmoe_ext.checkpoint.families.family import DEEPSEEK2, TensorTransform, Values

UNUSED = ("rope.freq_base", "attention.value_length")  # rotary embeddings; values without latent attention
KEYS = MappingProxyType({"ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"})


def _kinds(said: Values, num_layers: int) -> list[str]:
    return gguf_recurrent.kinds(said, num_layers, "linear_attention")


def _facts(config: Any) -> dict[str, Any]:
    return {
        **{key: getattr(config, attribute) for key, attribute in KEYS.items()},
        gguf_recurrent.HEADS: [int(kind == "full_attention") for kind in config.layer_types],
    }


def _complete(values: dict[str, Any]) -> None:
    values["linear_num_heads"] = values["num_attention_heads"]


def _read_convolutions(config: Any, *parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1, 1, part.shape[-1]) for part in parts])


KIMI_LINEAR = replace(
    DEEPSEEK2,
    name="kimi-linear",
    names={
        **DEEPSEEK2.names,
        "self_attn.forget_gate.f_a_proj.": "ssm_f_a.",
        "self_attn.forget_gate.f_b_proj.": "ssm_f_b.",
        "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
        "self_attn.b_proj.": "ssm_beta.",
        "self_attn.g_a_proj.": "ssm_g_a.",
        "self_attn.g_b_proj.": "ssm_g_b.",
        "self_attn.o_norm.": "ssm_norm.",
    },
    keys={**DEEPSEEK2.keys, **KEYS, "expert_weights_norm": "moe_renormalize", **dict.fromkeys(UNUSED)},
    missing={
        **{"first_k_dense_replace": 0, "moe_renormalize": True, "routed_scaling_factor": 1.0},
        **{"q_lora_rank": None, "pad_token_id": None},
    },
    needs=(*DEEPSEEK2.needs[1:], *KEYS, gguf_recurrent.HEADS),
    fixed={"moe_renormalize": True, "tie_word_embeddings": False},
    turned=(
        TensorTransform(
            "self_attn.conv1d.weight",
            tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),
            _read_convolutions,
            lambda config, w: w.chunk(3),
        ),
        gguf_recurrent.one(
            "self_attn.forget_gate.A_log",
            "ssm_a",
            lambda config, a: gguf_recurrent.log(a).reshape(1, 1, -1, 1),
            lambda config, a: gguf_recurrent.exp(a).reshape(-1, 1),
        ),
    ),
    kinds=_kinds,
    facts=_facts,
    complete=_complete,
)
