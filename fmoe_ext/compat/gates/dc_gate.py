"""fmoe.gates.dc_gate."""

from fmoe_ext.gates.dc_gate import DCGate

__all__ = ["DCGate"]
