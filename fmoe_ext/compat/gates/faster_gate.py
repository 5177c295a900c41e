"""fmoe.gates.faster_gate."""

from fmoe_ext import _env
from fmoe_ext.gates.faster_gate import FasterGate, gen_faster_gate

nw_per_node = _env.get("FMOE_TOPO_GPUS_PER_NODE")

__all__ = ["FasterGate", "gen_faster_gate", "nw_per_node"]
