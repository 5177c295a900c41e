"""Kimi Linear: latent attention without rotary embeddings, and layers of Kimi's delta attention."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.gguf.architecture import Fields, Shapes, Values
from fmoe_ext.gguf.architectures.deepseek2 import DeepseekV2
from fmoe_ext.gguf.recurrent import KEY_HEADS, kinds_of
from fmoe_ext.gguf.transforms import TensorTransform, exp, log, one, renamed

_DELTA = MappingProxyType({"ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"})


class KimiLinear(DeepseekV2):
    name = "kimi-linear"
    model_type = "kimi_linear"
    keys = MappingProxyType({**DeepseekV2.keys, **_DELTA})
    harmless = ("rope.freq_base", "attention.value_length")  # of rotary embeddings; without latent attention
    needs = (*DeepseekV2.needs[1:], *_DELTA, KEY_HEADS)
    defaults = MappingProxyType({"moe_renormalize": True, "q_lora_rank": None, "pad_token_id": None})
    fixed = MappingProxyType({"moe_renormalize": True, "tie_word_embeddings": False})

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        return {**values, "linear_num_heads": values["num_attention_heads"]}

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        return kinds_of(fields, num_layers, "linear_attention")

    def fields(self, config: Any) -> dict[str, Any]:
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _DELTA.items()},
            KEY_HEADS: [int(kind == "full_attention") for kind in config.layer_types],
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        gate = "self_attn.forget_gate."
        return {
            **super().transforms(config),
            f"{gate}f_a_proj.weight": renamed("ssm_f_a.weight"),
            f"{gate}f_b_proj.weight": renamed("ssm_f_b.weight"),
            f"{gate}dt_bias": renamed("ssm_dt.bias"),
            f"{gate}A_log": one(
                "ssm_a", lambda a: log(a).reshape(1, 1, -1, 1), lambda a: exp(a).reshape(-1, 1)
            ),
            "self_attn.conv1d.weight": TensorTransform(
                tuple(f"ssm_conv1d_{part}.weight" for part in "qkv"),
                lambda *parts: torch.cat([part.reshape(-1, 1, part.shape[-1]) for part in parts]),
                lambda w: w.chunk(3),
            ),
        }
