"""fmoe.gates.switch_gate."""

from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.gates.switch_gate import SwitchGate as _SwitchGate


class SwitchGate(NaiveGate, _SwitchGate):
    """SwitchGate with topk_weights of the model's dtype."""


__all__ = ["SwitchGate"]
