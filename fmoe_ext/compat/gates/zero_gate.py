"""fmoe.gates.zero_gate."""

from fmoe_ext.compat.gates.model_dtype import ModelDtype
from fmoe_ext.gates.zero_gate import ZeroGate as _ZeroGate


class ZeroGate(ModelDtype, _ZeroGate):
    """ZeroGate with topk_weights of the model's dtype."""


__all__ = ["ZeroGate"]
