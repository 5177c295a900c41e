"""fmoe.gates.faster_gate."""

import functools
from collections.abc import Callable

from fmoe_ext import _env
from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.gates.faster_gate import FasterGate as _FasterGate
from fmoe_ext.gates.faster_gate import make_faster_gate

nw_per_node = _env.get("FMOE_TOPO_GPUS_PER_NODE")


class FasterGate(NaiveGate, _FasterGate):
    """FasterGate with topk_weights of the model's dtype."""


def gen_faster_gate(rank: int) -> Callable[..., FasterGate]:
    """A gate for FMoE(gate=...): FasterGate on node number rank."""
    return functools.partial(make_faster_gate, FasterGate, rank)


__all__ = ["FasterGate", "gen_faster_gate", "nw_per_node"]
