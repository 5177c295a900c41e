"""Hunyuan-A13B."""

from fmoe_ext.gguf.architecture import Architecture


class HunyuanMoe(Architecture):
    name = "hunyuan-moe"
    model_type = "hunyuan_v1_moe"
