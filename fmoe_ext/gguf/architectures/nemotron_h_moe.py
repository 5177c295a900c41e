"""Nemotron-H: each layer is one of Mamba-2, attention without rotary embeddings, or experts without a gate."""

from types import MappingProxyType
from typing import Any

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import EPSILON, Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.recurrent import KEY_HEADS, head_size, heads_of, kinds_of, of_mamba, one_number
from fmoe_ext.gguf.transforms import TensorTransform

_MAMBA = MappingProxyType(
    {
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    }
)
_NORM = "attention.layer_norm_epsilon"
_WIDTHS = "feed_forward_length"  # a list with an entry a layer, 0 for those without experts


class NemotronHMoe(Architecture):
    name = "nemotron_h_moe"
    model_type = "nemotron_h"
    keys = MappingProxyType(
        {
            **_MAMBA,
            "ssm.inner_size": "inner_size",
            "moe_latent_size": "moe_latent_size",
            _NORM: "layer_norm_epsilon",
            EPSILON: "layer_norm_epsilon",
        }
    )
    harmless = ("rope.freq_base", "rope.dimension_count")
    needs = (*_MAMBA, "ssm.inner_size", _NORM, KEY_HEADS, _WIDTHS)
    defaults = MappingProxyType({"moe_latent_size": None})
    fixed = MappingProxyType(
        {"mlp_hidden_act": "relu2", "use_conv_bias": True, "use_bias": False, "mlp_bias": False}
    )
    has_mtp = True
    rotates_pairs = True
    attention_block = "mixer"

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = one_number(self.name, super().config(fields, shapes, factors))
        del values["intermediate_size"]  # the list _WIDTHS, which layer_types() reads
        inner, heads = values.pop("inner_size"), values.pop("mamba_num_heads")
        size = head_size(self.name, inner, heads)
        return {**values, "mamba_num_heads": heads, "mamba_head_dim": size}

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        kinds, widths = kinds_of(fields, num_layers, "linear_attention"), fields[_WIDTHS]
        if not isinstance(widths, list) or len(widths) < num_layers:
            raise CheckpointError(
                f"{self.name}.{_WIDTHS} is {widths!r}, expected a list of {num_layers} entries"
            )
        return ["moe" if widths[i] else kind for i, kind in enumerate(kinds)]

    def fields(self, config: Any) -> dict[str, Any]:
        latent = {"moe_latent_size": config.moe_latent_size} if config.moe_latent_size else {}
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _MAMBA.items()},
            **latent,
            "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
            _NORM: float(config.layer_norm_epsilon),
            KEY_HEADS: heads_of(config),
            _WIDTHS: [config.moe_intermediate_size if kind == "moe" else 0 for kind in config.layer_types],
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {**super().transforms(config), **of_mamba("mixer.", config.n_groups)}

    def in_checkpoints(self, name: str) -> str:
        return name.replace("model.layers.", "backbone.layers.", 1)
