"""The architectures of llama.cpp that are read and written: a class each, in a file with its relatives.

plain.py has those that differ by their keys alone.
"""

from fmoe_ext.gguf.architecture import Architecture
from fmoe_ext.gguf.architectures.deepseek2 import DeepseekV2, DeepseekV3, Glm4MoeLite
from fmoe_ext.gguf.architectures.exaone_moe import ExaoneMoe
from fmoe_ext.gguf.architectures.gemma4 import Gemma4
from fmoe_ext.gguf.architectures.glm4moe import Glm4Moe, SolarOpen
from fmoe_ext.gguf.architectures.glm_dsa import GlmDsa
from fmoe_ext.gguf.architectures.gpt_oss import GptOss
from fmoe_ext.gguf.architectures.granitehybrid import GraniteHybrid
from fmoe_ext.gguf.architectures.granitemoe import GraniteMoe, GraniteMoeShared
from fmoe_ext.gguf.architectures.kimi_linear import KimiLinear
from fmoe_ext.gguf.architectures.lfm2moe import Lfm2Moe
from fmoe_ext.gguf.architectures.nemotron_h_moe import NemotronHMoe
from fmoe_ext.gguf.architectures.plain import (
    Afmoe,
    Dots1,
    Ernie45Moe,
    HunyuanMoe,
    Llama,
    MiniMaxM2,
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
)
from fmoe_ext.gguf.architectures.qwen3next import Qwen3Next
from fmoe_ext.gguf.architectures.qwen35moe import Qwen35Moe

# Of several for one name in files, the first that accepts a file's keys reads it, or the last
ARCHITECTURES: tuple[type[Architecture], ...] = (
    Afmoe,
    DeepseekV2,
    DeepseekV3,
    Glm4MoeLite,
    Dots1,
    Ernie45Moe,
    ExaoneMoe,
    Gemma4,
    Glm4Moe,
    SolarOpen,
    GlmDsa,
    GptOss,
    GraniteMoe,
    GraniteMoeShared,
    GraniteHybrid,
    HunyuanMoe,
    KimiLinear,
    Lfm2Moe,
    Llama,
    MiniMaxM2,
    NemotronHMoe,
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
    Qwen3Next,
    Qwen35Moe,
)
