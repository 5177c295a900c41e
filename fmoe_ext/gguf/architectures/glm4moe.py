"""GLM-4.5 and GLM-4.6, and Solar Open, which has their name in files."""

from types import MappingProxyType

from torch import Tensor

from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values


class Glm4Moe(Architecture):
    name = "glm4moe"
    model_type = "glm4_moe"
    keys = MappingProxyType({"leading_dense_block_count": "first_k_dense_replace"})
    defaults = MappingProxyType({"num_mtp_layers": 0})
    has_mtp = writes_heads = True
    has_biases = True
    rotates_part = True

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        return {
            **super().config(fields, shapes, factors),
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        }


class SolarOpen(Glm4Moe):
    """It has MoE layers alone, and its files no key that tells them from those of GLM."""

    model_type = "solar_open"
    keys = MappingProxyType({})
    writes_heads = False
