"""fmoe.gates.zero_gate."""

from fmoe_ext.gates.zero_gate import ZeroGate

__all__ = ["ZeroGate"]
