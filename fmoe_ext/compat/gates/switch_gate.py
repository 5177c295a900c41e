"""fmoe.gates.switch_gate."""

from fmoe_ext.gates.switch_gate import SwitchGate

__all__ = ["SwitchGate"]
