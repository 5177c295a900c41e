"""Granite 3 MoE, with a shared MLP or without, and Granite 4 (with Mamba-2 layers).

Files of both kinds of Granite 3 are called granitemoe: the width of the shared MLP tells them apart (accepts()).
"""

import math
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.recurrent import KEY_HEADS, head_size, heads_of, kinds_of, of_mamba, one_number
from fmoe_ext.gguf.transforms import TensorTransform, halves, renamed

# Granite multiplies attention, embeddings, residuals and logits by numbers of its own
_SCALES = MappingProxyType(
    {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
)
_WIDTH = "expert_shared_feed_forward_length"


class GraniteMoe(Architecture):
    name = "granitemoe"
    model_type = "granitemoe"
    keys = _SCALES
    needs: tuple[str, ...] = ("attention.scale",)
    defaults = MappingProxyType(
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    )
    rotates_pairs = True

    def accepts(self, fields: Fields) -> bool:
        return super().accepts(fields) and not fields.get(_WIDTH)

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        if values["attention_multiplier"] == 0:  # "not used": llama.cpp takes the usual one
            values["attention_multiplier"] = values["head_dim"] ** -0.5
        return values

    def fields(self, config: Any) -> dict[str, Any]:
        scales = {key: float(getattr(config, attribute)) for key, attribute in _SCALES.items()}
        return {**super().fields(config), **self.layers(config), **scales}

    def layers(self, config: Any) -> dict[str, Any]:
        """Return the metadata of the parts beside attention and experts."""
        return {}

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        # the package knows the router by its name in files, router.layer.weight
        router = f"{self.family.in_modules.block}.router.weight"
        return {**super().transforms(config), router: renamed("ffn_gate_inp.weight")}


class GraniteMoeShared(GraniteMoe):
    model_type = "granitemoeshared"
    keys = MappingProxyType({**_SCALES, _WIDTH: "shared_intermediate_size"})

    def accepts(self, fields: Fields) -> bool:
        return bool(fields.get(_WIDTH))

    def layers(self, config: Any) -> dict[str, Any]:
        return {_WIDTH: config.shared_intermediate_size} if config.shared_intermediate_size else {}

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {
            **super().transforms(config),
            "shared_mlp.input_linear.weight": halves("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
            "shared_mlp.output_linear.weight": renamed("ffn_down_shexp.weight"),
        }


_MAMBA = MappingProxyType(
    {
        "ssm.conv_kernel": "mamba_d_conv",
        "ssm.state_size": "mamba_d_state",
        "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    }
)
_ROPE = "rope.scaling.finetuned"  # Granite's files use this key as a switch for rotary embeddings


class GraniteHybrid(GraniteMoeShared):
    """Granite 4: layers of Mamba-2 beside those of attention, rotary embeddings where the file says so."""

    name = "granitehybrid"
    model_type = "granitemoehybrid"
    keys = MappingProxyType(
        {**GraniteMoeShared.keys, **_MAMBA, "ssm.inner_size": "inner_size", _ROPE: "position_embedding_type"}
    )
    needs = ("attention.scale", *_MAMBA, "ssm.inner_size", KEY_HEADS)
    defaults = MappingProxyType({**GraniteMoeShared.defaults, "position_embedding_type": True})
    fixed = MappingProxyType(
        {
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": (0.0, math.inf),
        }
    )

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = one_number(self.name, super().config(fields, shapes, factors))
        # The file has the width of all Mamba heads together, the configuration their size and the factor of widths
        inner, width = values.pop("inner_size"), values["hidden_size"]
        values["mamba_d_head"] = head_size(self.name, inner, values["mamba_n_heads"])
        if type(width) is not int or width < 1 or inner % width:
            raise CheckpointError(
                f"{self.name}.ssm.inner_size is {inner}, no multiple of embedding_length {width!r}"
            )
        values["mamba_expand"] = inner // width
        # Layers of attention have rotary embeddings, or no positions at all
        rotates = values["position_embedding_type"]
        if type(rotates) is not bool:
            raise CheckpointError(f"{self.name}.{_ROPE} is {rotates!r}, expected true or false")
        values["position_embedding_type"] = "rope" if rotates else None
        return values

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        return kinds_of(fields, num_layers, "linear_attention")

    def layers(self, config: Any) -> dict[str, Any]:
        return {
            **super().layers(config),
            **{key: getattr(config, attribute) for key, attribute in _MAMBA.items()},
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            KEY_HEADS: heads_of(config),
            _ROPE: config.position_embedding_type == "rope",
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {**super().transforms(config), **of_mamba("mamba.", config.mamba_n_groups)}
