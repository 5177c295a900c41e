"""GPT-OSS: every second layer has a sliding window, each head an attention sink, and SwiGLU is clamped.

Transformers does not round the bounds of YaRN's ramp here; llama.cpp does, so its logits differ a little.
"""

from types import MappingProxyType
from typing import Any

from fmoe_ext.gguf.architecture import Architecture
from fmoe_ext.gguf.transforms import TensorTransform, renamed


class GptOss(Architecture):
    name = "gpt-oss"
    model_type = "gpt_oss"
    keys = MappingProxyType({"attention.sliding_window": "sliding_window"})
    needs = ("attention.sliding_window",)
    # constants of llama.cpp's graph: no key has them
    fixed = MappingProxyType({"swiglu_alpha": 1.702, "swiglu_limit": 7.0})
    has_biases = True
    rounds_yarn = False
    window_period = 2

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {**super().transforms(config), "self_attn.sinks": renamed("attn_sinks.weight")}
