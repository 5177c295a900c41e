"""fmoe_ext: Mixture-of-Experts training for PyTorch."""

from fmoe_ext import ops
from fmoe_ext.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from fmoe_ext.layers import FMoE
from fmoe_ext.linear import FMoELinear
from fmoe_ext.transformer import FMoETransformerMLP

__version__ = "0.1.0"
__all__ = [
    "BaseGate",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "GShardGate",
    "NaiveGate",
    "SwitchGate",
    "ops",
]
