"""fmoe.gates.swipe_gate."""

from fmoe_ext.gates.swipe_gate import SwipeGate

__all__ = ["SwipeGate"]
