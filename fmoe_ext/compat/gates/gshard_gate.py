"""fmoe.gates.gshard_gate."""

from fmoe_ext.gates.gshard_gate import GShardGate

__all__ = ["GShardGate"]
