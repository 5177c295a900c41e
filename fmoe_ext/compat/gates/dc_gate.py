"""fmoe.gates.dc_gate."""

from fmoe_ext.compat.gates.gshard_gate import GShardGate
from fmoe_ext.gates.dc_gate import DCGate as _DCGate


class DCGate(GShardGate, _DCGate):
    """DCGate with topk_weights of the model's dtype."""

    expert_capacity = _DCGate.expert_capacity


__all__ = ["DCGate"]
