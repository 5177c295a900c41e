"""fmoe.gates.naive_gate."""

from fmoe_ext.compat.gates.model_dtype import ModelDtype
from fmoe_ext.gates.naive_gate import NaiveGate as _NaiveGate


class NaiveGate(ModelDtype, _NaiveGate):
    """NaiveGate with topk_weights of the model's dtype."""


__all__ = ["NaiveGate"]
