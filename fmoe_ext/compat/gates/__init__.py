"""fmoe.gates."""

from fmoe_ext.compat.gates import utils
from fmoe_ext.compat.gates.dc_gate import DCGate
from fmoe_ext.compat.gates.gshard_gate import GShardGate
from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.compat.gates.noisy_gate import NoisyGate
from fmoe_ext.compat.gates.swipe_gate import SwipeGate
from fmoe_ext.compat.gates.switch_gate import SwitchGate
from fmoe_ext.compat.gates.zero_gate import ZeroGate

__all__ = [
    "DCGate",
    "GShardGate",
    "NaiveGate",
    "NoisyGate",
    "SwipeGate",
    "SwitchGate",
    "ZeroGate",
    "utils",
]
