"""fmoe.gates.naive_gate."""

from fmoe_ext.gates.naive_gate import NaiveGate

__all__ = ["NaiveGate"]
