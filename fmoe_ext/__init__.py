"""fmoe_ext: Mixture-of-Experts training for PyTorch."""

from fmoe_ext import balance, gates, ops
from fmoe_ext.gates import (
    BaseGate,
    DCGate,
    ExpertChoiceGate,
    FasterGate,
    GShardGate,
    NaiveGate,
    NoisyGate,
    RoutingReplay,
    SigmoidGate,
    SoftmaxGate,
    SwipeGate,
    SwitchGate,
    UniformGate,
    ZeroGate,
)
from fmoe_ext.integrations.fmoefy import fmoefy
from fmoe_ext.layers import FMoE
from fmoe_ext.linear import FMoELinear
from fmoe_ext.tokens import packed_sequences, valid_tokens
from fmoe_ext.transformer import FMoETransformerMLP

__version__ = "0.1.0"
__all__ = [
    "BaseGate",
    "DCGate",
    "ExpertChoiceGate",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "FasterGate",
    "GShardGate",
    "NaiveGate",
    "NoisyGate",
    "RoutingReplay",
    "SigmoidGate",
    "SoftmaxGate",
    "SwipeGate",
    "SwitchGate",
    "UniformGate",
    "ZeroGate",
    "balance",
    "fmoefy",
    "gates",
    "ops",
    "packed_sequences",
    "valid_tokens",
]
