"""ERNIE 4.5 MoE."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import Architecture


class Ernie45Moe(Architecture):
    name = "ernie4_5-moe"
    model_type = "ernie4_5_moe"
    keys = MappingProxyType(
        {
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        }
    )
    defaults = MappingProxyType({"moe_layer_interval": 1, "moe_num_shared_experts": 0})
