"""Other exchanges, numbers of tokens and kinds of layers over ranks, compiled; and what is refused there."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compiled_steps import LAYOUTS, D, Graphs, Layout, largest_difference, make, on_ranks, train

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.ep.static import check_max_rows
from fmoe_ext.testing import DistributedError
from tests.forked import run_python

OTHERS = (
    "overlap",
    "token",
    "token, static",
    "node",
    "auto",
    "shadowed",
    "node, shadowed",
    "shared and latent",
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize(("backend", "tolerance"), [("aot_eager", 0), ("inductor", 1e-12)])
def test_step_is_one_graph(pool, layout, backend, tolerance):
    assert on_ranks(pool, LAYOUTS[layout], largest_difference, "naive", backend) <= tolerance


@pytest.mark.parametrize("layout", ["token", "shadowed", "node, shadowed"])
def test_step_is_traced_whole(pool, layout):
    assert on_ranks(pool, LAYOUTS[layout], largest_difference, "naive", "eager", (5,)) == 0


def num_graphs(layout, sizes):
    torch.compiler.reset()
    graphs = Graphs("eager")
    train(layout, "naive", graphs, sizes)
    return graphs.count


def test_second_step_compiles_nothing():
    """In a fresh process: the first call had set attributes that graphs are guarded by, and was compiled again."""
    program = """if True:
        from compiled_steps import LAYOUTS, Graphs, torch, train
        for gate in ("softmax", "naive"):
            torch.compiler.reset()
            graphs = Graphs("eager")
            train(LAYOUTS["one rank"], gate, graphs, (5, 5))
            print(gate, graphs.count)
    """
    done = run_python(program, cwd=Path(__file__).parent)
    assert done.stdout == "softmax 1\nnaive 1\n", done.stderr


@pytest.mark.parametrize("layout", ["one rank", pytest.param("ep 2, static", marks=pytest.mark.slow), "ep 2"])
def test_numbers_of_tokens_take_two_compilations(pool, layout):
    """The first number, and one graph for all others."""
    assert on_ranks(pool, LAYOUTS[layout], num_graphs, (5, 8, 3, 11, 4)) <= 2


def test_few_tokens_are_one_graph(pool):
    """One and none on rank 0; torch compiles a graph for either number."""
    assert on_ranks(pool, LAYOUTS["ep 2"], largest_difference, "naive", "eager", (1, 0)) == 0


def too_many_rows(exchange, on_device):
    layer = make("naive", Layout(2, {"exchange": exchange, "max_rows_per_rank": 1}))
    layer.expert_parallel.row_limit.raises_at_once = not on_device
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = step(torch.randn(9, D, dtype=torch.float64))
    assert y.isnan().any()
    check_max_rows(layer)


@pytest.mark.parametrize(
    ("exchange", "on_device"),
    [pytest.param("choice", False, marks=pytest.mark.long), ("token", False), ("choice", True)],
)
def test_too_many_rows_in_a_static_graph_raise(pool, exchange, on_device):
    """On the CPU in the forward; where nothing may wait for the device, all is NaN and the check raises."""
    with pytest.raises(DistributedError, match=r"max_rows_per_rank is 1, but rank 0 has \d+ rows"):
        pool.run(too_many_rows, exchange, on_device, world_size=2)


def another_width():
    layer = FMoETransformerMLP(2, D + 2 * dist.get_rank(), 12, world_size=2)
    torch.compile(layer, fullgraph=True, backend="eager")(torch.randn(4, layer.d_model))


def one_is_eager():
    layer = make("naive", LAYOUTS["overlap"])
    step = torch.compile(layer, fullgraph=True, backend="eager") if dist.get_rank() else layer
    step(torch.randn(4, D, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "text"),
    [(another_width, "elements of a token"), (one_is_eager, r"chunks of experts.*\(rank 0: 2, rank 1: 1\)")],
)
def test_ranks_that_differ_are_refused(pool, function, text):
    with pytest.raises(DistributedError, match=text):
        pool.run(function, world_size=2)
