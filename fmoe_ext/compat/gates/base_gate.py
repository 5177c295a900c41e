"""fmoe.gates.base_gate."""

from fmoe_ext.gates.base_gate import BaseGate

__all__ = ["BaseGate"]
