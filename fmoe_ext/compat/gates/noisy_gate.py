"""fmoe.gates.noisy_gate."""

from fmoe_ext.compat.gates.model_dtype import ModelDtype
from fmoe_ext.gates.noisy_gate import NoisyGate as _NoisyGate


class NoisyGate(ModelDtype, _NoisyGate):
    """NoisyGate with topk_weights of the model's dtype."""


__all__ = ["NoisyGate"]
