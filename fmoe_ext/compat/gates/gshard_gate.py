"""fmoe.gates.gshard_gate."""

from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.gates.gshard_gate import GShardGate as _GShardGate


class GShardGate(NaiveGate, _GShardGate):
    """GShardGate with topk_weights of the model's dtype."""


__all__ = ["GShardGate"]
