"""Gates choose K experts for each token: forward(inp [T, d_model]) -> topk_idx, topk_weights [T, K]."""

from fmoe_ext.gates.base_gate import BaseGate, OneWorker
from fmoe_ext.gates.gshard_gate import GShardGate
from fmoe_ext.gates.naive_gate import NaiveGate
from fmoe_ext.gates.switch_gate import SwitchGate

__all__ = ["BaseGate", "GShardGate", "NaiveGate", "OneWorker", "SwitchGate"]
