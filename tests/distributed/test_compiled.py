"""A compiled training step of a layer whose experts are on two ranks: one graph, and eager's bits."""

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.ep.static import check_max_rows
from fmoe_ext.gates import GATES, QuantileGate, total_loss
from fmoe_ext.testing import DistributedError

D = 8
LAYOUTS = {
    "exact": {},
    "static": {"max_rows_per_rank": 20},
    "overlap": {"overlap_degree": 2},
    "token": {"exchange": "token"},
    "token, static": {"exchange": "token", "max_rows_per_rank": 12},
    "node": {"exchange": "node"},
    "auto": {"exchange": "auto", "overlap_degree": "auto"},
    "shadows": {"shadows": (1, 2)},
    "shared and latent": {"shared_expert_hidden": 3, "latent_size": 4},
}
SHORT_LAYOUTS = ("static", "token", "shadows")
SHORT_GATES = ("sigmoid", "switch", "expert_choice")


def make(gate="naive", shadows=(), **options):
    torch.manual_seed(1)
    layer = FMoETransformerMLP(2, D, 12, gate=gate, world_size=2, **options).double()
    layer.expert_parallel.shadows = shadows
    if isinstance(layer.gate, QuantileGate):
        layer.gate.update_bias()  # its buffers are float32 again
    return layer


def train(backend, sizes, **options):
    """Steps with these numbers of tokens, one more on rank 1 -> outputs, losses, gradients, the state after."""
    layer, seen = make(**options), []

    def forward(x):
        return layer(x), total_loss(layer)

    step = forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for size in sizes:
        torch.manual_seed(size + dist.get_rank())
        x = torch.randn(size + dist.get_rank(), D, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        y, loss = step(x)
        (y.square().sum() + loss).backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [y.detach(), loss.detach(), x.grad, *grads]
        optimizer.step()
    return [*seen, *layer.state_dict().values()]


def assert_bits(cases, backend="aot_eager", tolerance=0.0, sizes=(5, 8, 3)):
    for options in cases:
        torch.compiler.reset()
        ours, theirs = train(backend, sizes, **options), train(None, sizes, **options)
        off = [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()]
        assert len(ours) == len(theirs) and max(off) <= tolerance, (options, sizes, off)


def test_layouts_are_one_graph(pool):
    pool.run(assert_bits, [LAYOUTS[name] for name in SHORT_LAYOUTS], world_size=2)


@pytest.mark.slow
def test_every_layout_is_one_graph(pool):
    pool.run(assert_bits, list(LAYOUTS.values()), world_size=2, timeout=600)


def test_few_tokens_are_one_graph(pool):
    pool.run(assert_bits, [{}], "aot_eager", 0.0, (1, 0), world_size=2)


def test_gates_are_one_graph(pool):
    pool.run(assert_bits, [{"gate": gate} for gate in SHORT_GATES], world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["exact", "static"])
def test_every_gate_is_one_graph(pool, layout):
    cases = [{"gate": gate, **LAYOUTS[layout]} for gate in GATES if gate != "sinkhorn"]
    pool.run(assert_bits, cases, world_size=2, timeout=600)


@pytest.mark.slow
def test_inductor_differs_by_rounding(pool):
    pool.run(assert_bits, list(LAYOUTS.values()), "inductor", 1e-12, world_size=2, timeout=600)


def too_many_rows(on_device):
    layer = make(max_rows_per_rank=1)
    layer.expert_parallel.row_limit.raises_at_once = not on_device
    step = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y = step(torch.randn(9, D, dtype=torch.float64))
    assert y.isnan().any()
    check_max_rows(layer)


@pytest.mark.parametrize("on_device", [False, True])
def test_too_many_rows_in_a_static_graph_raise(pool, on_device):
    """On the CPU in the forward; where nothing may wait for the device, all is NaN and the check raises."""
    with pytest.raises(DistributedError, match=r"max_rows_per_rank is 1, but rank 0 has \d+ rows"):
        pool.run(too_many_rows, on_device, world_size=2)


def another_width():
    layer = FMoETransformerMLP(2, D + 2 * dist.get_rank(), 12, world_size=2)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(torch.randn(4, layer.d_model))


def one_is_eager():
    layer = make(overlap_degree=2)
    step = torch.compile(layer, fullgraph=True, backend="aot_eager") if dist.get_rank() else layer
    step(torch.randn(4, D, dtype=torch.float64))


@pytest.mark.parametrize(
    ("function", "text"),
    [(another_width, "elements of a token"), (one_is_eager, r"chunks of experts.*\(rank 0: 2, rank 1: 1\)")],
)
def test_ranks_that_differ_are_refused(pool, function, text):
    with pytest.raises(DistributedError, match=text):
        pool.run(function, world_size=2)
