"""The graph breaks of a training step, by gate and layout: docs/compile.md has them, and none may come."""

import re
from pathlib import Path

import pytest
import torch
from compiled_steps import LAYOUTS, D, make, on_ranks
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.gates import GATES, total_loss

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile.md"
OF_GATES = ("one rank", "ep 2", "ep 2, static")
OF_LAYOUTS = [name for name in LAYOUTS if name not in OF_GATES and LAYOUTS[name].num_stages == 1]
OTHER_LAYERS = {
    "experts by another activation": lambda: FMoETransformerMLP(4, D, 12, activation=torch.tanh),
    "separate experts": lambda: FMoE(4, D, expert=lambda d: nn.Linear(d, d)),
    "main gradients": lambda: FMoETransformerMLP(4, D, 12, gradient_accumulation_fusion=True),
}


def breaks_of(layer):
    def step(x):
        return layer(x), total_loss(layer)

    torch.compiler.reset()
    dtype = next(layer.parameters()).dtype
    with torch._dynamo.config.patch(capture_scalar_outputs=True):  # as fullgraph=True sets it
        return torch._dynamo.explain(step)(torch.randn(5, D, dtype=dtype)).graph_break_count


def breaks_of_gates(layout, gates):
    return {gate: breaks_of(make(gate, layout)) for gate in gates}


def rows():
    """{first cell: the others} of the tables of the page."""
    page = PAGE.read_text().split("## Checkpoints")[0]
    lines = re.findall(r"^\| `?([^`|]+?)`? \|(.*)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split("|")] for name, cells in lines}


@pytest.mark.parametrize(
    ("layout", "gates"),
    [
        ("one rank", ["softmax", "sinkhorn"]),
        ("ep 2", ["sinkhorn"]),
        *(pytest.param(layout, list(GATES), marks=pytest.mark.slow) for layout in OF_GATES),
    ],
)
def test_breaks_of_gates(pool, layout, gates):
    column = OF_GATES.index(layout)
    measured = on_ranks(pool, LAYOUTS[layout], breaks_of_gates, gates)
    assert measured == {gate: int(rows()[gate][column]) for gate in gates}


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_LAYOUTS)
def test_breaks_of_layouts(pool, layout):
    measured = on_ranks(pool, LAYOUTS[layout], breaks_of_gates, ["naive"])
    assert measured["naive"] == int(rows()[layout][0])


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_breaks_of_other_layers(name):
    """Compare whether there are any; their number depends on what torch has traced before."""
    assert (breaks_of(OTHER_LAYERS[name]()) > 0) == rows()[name][0].startswith("yes")


def test_every_gate_and_layout_has_a_row():
    assert set(rows()) >= {*GATES, *OF_LAYOUTS, *OTHER_LAYERS}
    assert all(len(rows()[gate]) == len(OF_GATES) for gate in GATES)
