"""Every gate in every layout: a compiled training step is one graph, with the bits of eager."""

import pytest
from compiled_steps import LAYOUTS, largest_difference, on_ranks

from fmoe_ext.gates import GATES

MATRIX = ("one rank", "ep 2", "ep 2, static", "ep 2 x pp 2")
# In the default run each gate is traced once, and AOTAutograd sees these.
QUICK = {("softmax", "one rank"), ("switch", "ep 2, static")}
TRACED = [name for name in GATES if name not in {gate for gate, _ in QUICK}]


def slow_unless_quick(gate, layout):
    return pytest.param(gate, layout, marks=() if (gate, layout) in QUICK else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:.*no balance loss")
@pytest.mark.parametrize(
    ("gate", "layout"), [slow_unless_quick(gate, layout) for gate in GATES for layout in MATRIX]
)
def test_step_is_one_graph_with_the_bits_of_eager(pool, gate, layout):
    assert on_ranks(pool, LAYOUTS[layout], largest_difference, gate, "aot_eager") == 0


def test_pipeline_traces_each_block_whole(pool):
    assert on_ranks(pool, LAYOUTS["ep 2 x pp 2"], largest_difference, "naive", "eager") == 0


def largest_differences(layout, gates, backend):
    return {gate: largest_difference(layout, gate, backend, (5,)) for gate in gates}


@pytest.mark.filterwarnings("ignore:.*no balance loss")
@pytest.mark.parametrize(("layout", "gates"), [("one rank", TRACED[::2]), ("ep 2", TRACED[1::2])])
def test_other_gates_are_traced_whole(pool, layout, gates):
    differences = on_ranks(pool, LAYOUTS[layout], largest_differences, gates, "eager")
    assert differences == dict.fromkeys(gates, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no balance loss")
@pytest.mark.parametrize("layout", MATRIX)
@pytest.mark.parametrize("gate", GATES)
def test_inductor_differs_by_rounding(pool, gate, layout):
    assert on_ranks(pool, LAYOUTS[layout], largest_difference, gate, "inductor") <= 1e-12
