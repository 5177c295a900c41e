"""Granite 3 MoE, with a shared MLP or without."""

from types import MappingProxyType
from typing import Any

from torch import Tensor

from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.transforms import TensorTransform, halves, renamed

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
        if values["attention_multiplier"] == 0:  # llama.cpp takes the usual one
            values["attention_multiplier"] = values["head_dim"] ** -0.5
        return values

    def fields(self, config: Any) -> dict[str, Any]:
        scales = {key: float(getattr(config, attribute)) for key, attribute in _SCALES.items()}
        return {**super().fields(config), **self.layers(config), **scales}

    def layers(self, config: Any) -> dict[str, Any]:
        """Return the metadata of the parts beside attention and experts."""
        return {}

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
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
