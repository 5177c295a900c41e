"""Trinity."""

from types import MappingProxyType

from fmoe_ext.gguf.architecture import Architecture


class Afmoe(Architecture):
    name = "afmoe"
    model_type = "afmoe"
    keys = MappingProxyType(
        {
            "leading_dense_block_count": "num_dense_layers",
            "attention.sliding_window": "sliding_window",
        }
    )
    needs = ("expert_weights_norm", "attention.sliding_window")
    defaults = MappingProxyType({"mup_enabled": True})
    fixed = MappingProxyType({"mup_enabled": True})
    window_period = 4
