"""A compiled training step of a layer with every loss of its gate in it: one graph, and eager's bits."""

from functools import partial

import pytest
from compiled_steps import LAYOUTS, largest_difference

from fmoe_ext.gates import GATES, ScoredGate, find_gate

LOSSES = {
    "none": {"balance_loss": None},
    "global": {"balance_loss": "global"},
    "running": {"balance_loss": "running"},
    "sequence": {"balance_loss": "sequence", "seq_len": 3},
    "all": {"balance_loss": {"running": 1.0, "global": 0.5, "sequence": 0.1}, "seq_len": 3, "z_weight": 0.1},
}
SCORED = [name for name, gate in GATES.items() if isinstance(gate, type) and issubclass(gate, ScoredGate)]


def slow_unless_quick(name, loss):
    return pytest.param(name, loss, marks=() if (name, loss) == ("sigmoid", "all") else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*no balance loss")
@pytest.mark.parametrize(
    ("name", "loss"), [slow_unless_quick(name, loss) for name in SCORED for loss in LOSSES]
)
def test_step_with_every_loss_is_one_graph(name, loss):
    """Also after the first step, where a gate that counts in training has changed its buffers."""
    gate = partial(find_gate(name), **LOSSES[loss])
    assert largest_difference(LAYOUTS["one rank"], gate, "aot_eager", (6, 6)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED)
def test_step_with_every_loss_by_inductor_differs_by_rounding(name):
    gate = partial(find_gate(name), **LOSSES["all"])
    assert largest_difference(LAYOUTS["one rank"], gate, "inductor", (6, 6)) <= 1e-12
