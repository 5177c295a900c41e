"""A compiled training step of a layer, with its gate's loss in it: one graph, and eager's bits."""

from functools import partial

import pytest
import torch

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import GATES, QuantileGate, ScoredGate, find_gate, total_loss

D, E = 8, 4
LOSSES = {
    "none": {"balance_loss": None},
    "global": {"balance_loss": "global"},
    "running": {"balance_loss": "running"},
    "sequence": {"balance_loss": "sequence", "seq_len": 3},
    "all": {"balance_loss": {"running": 1.0, "global": 0.5, "sequence": 0.1}, "seq_len": 3, "z_weight": 0.1},
}
SCORED = [name for name, gate in GATES.items() if isinstance(gate, type) and issubclass(gate, ScoredGate)]
EVERY = [(name, loss) for name in SCORED for loss in LOSSES]
SHORT = [*((name, "") for name in GATES if name not in SCORED), *((name, "all") for name in SCORED)]
CASES = [
    *SHORT,
    *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in SHORT),
]


def train(gate, backend):
    """Two steps of SGD -> every output, loss and gradient of them, and the state after."""
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, 2 * D, top_k=2, gate=gate).double()
    if isinstance(layer.gate, QuantileGate):
        layer.gate.update_bias()  # its buffers are float32 again

    def forward(x):
        return layer(x), total_loss(layer)

    step = forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        torch.manual_seed(3)  # of gates that draw noise
        x = torch.randn(6, D, dtype=torch.float64, requires_grad=True)
        y, loss = step(x)
        (y.square().mean() + loss).backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [y.detach(), loss.detach(), x.grad, *grads]
        optimizer.step()
    return [*seen, *layer.state_dict().values()]


@pytest.mark.filterwarnings("ignore:.*no balance loss")
@pytest.mark.parametrize(("name", "loss"), CASES)
def test_step_with_every_gate_and_loss_is_one_graph(name, loss):
    """Also after the first step, where a gate that counts in training has changed its buffers."""
    gate = partial(find_gate(name), **LOSSES[loss]) if loss else find_gate(name)
    torch.compiler.reset()
    ours, theirs = train(gate, "aot_eager"), train(gate, None)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss"), SHORT)
def test_step_by_inductor_differs_by_rounding(name, loss):
    if name in ("noisy", "swipe", "switch", "gshard", "faster", "dc"):
        pytest.skip("Inductor draws other random numbers")
    gate = partial(find_gate(name), **LOSSES[loss]) if loss else find_gate(name)
    torch.compiler.reset()
    for ours, theirs in zip(train(gate, "inductor"), train(gate, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
