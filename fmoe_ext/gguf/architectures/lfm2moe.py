"""LFM2 with experts: layers of short convolutions beside those of attention."""

from types import MappingProxyType
from typing import Any

from torch import Tensor

from fmoe_ext.gguf.architecture import EPSILON, Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.recurrent import KEY_HEADS, heads_of, kinds_of, one_number
from fmoe_ext.gguf.transforms import TensorTransform, convolution, renamed

_TAPS = "shortconv.l_cache"


class Lfm2Moe(Architecture):
    name = "lfm2moe"
    model_type = "lfm2_moe"
    keys = MappingProxyType(
        {EPSILON: "norm_eps", "leading_dense_block_count": "num_dense_layers", _TAPS: "conv_L_cache"}
    )
    needs = (_TAPS, KEY_HEADS)
    defaults = MappingProxyType({"norm_topk_prob": True})
    fixed = MappingProxyType({"norm_topk_prob": True, "routed_scaling_factor": 1.0, "conv_bias": False})

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        return one_number(self.name, super().config(fields, shapes, factors))

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        return kinds_of(fields, num_layers, "conv")

    def fields(self, config: Any) -> dict[str, Any]:
        return {**super().fields(config), KEY_HEADS: heads_of(config), _TAPS: config.conv_L_cache}

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {
            **super().transforms(config),
            "conv.conv.weight": convolution("shortconv.conv.weight"),
            "lm_head.weight": renamed("output.weight"),  # the package knows models with one embedding
        }
