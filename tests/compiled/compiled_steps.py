"""Training steps of layers in every layout, eager and compiled, and what compares the two."""

from dataclasses import dataclass, field

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import QuantileGate, find_gate, total_loss
from fmoe_ext.pipeline import Pipeline, init_groups, split

D, E = 8, 4
SIZES = (5, 8, 3)


@dataclass(frozen=True)
class Layout:
    """num_ranks that share the experts; num_stages of a pipeline; options of the layer; shadows: experts' places."""

    num_ranks: int
    options: dict = field(default_factory=dict)
    num_stages: int = 1
    shadows: tuple = ()


LAYOUTS = {
    "one rank": Layout(1),
    "ep 2": Layout(2),
    "ep 2, static": Layout(2, {"max_rows_per_rank": 20}),
    "ep 2 x pp 2": Layout(2, num_stages=2),
    "overlap": Layout(2, {"overlap_degree": 2}),
    "token": Layout(2, {"exchange": "token"}),
    "token, static": Layout(2, {"exchange": "token", "max_rows_per_rank": 12}),
    "node": Layout(2, {"exchange": "node"}),
    "auto": Layout(2, {"exchange": "auto", "overlap_degree": "auto"}),
    "shadowed": Layout(2, shadows=(1, 2)),
    "node, shadowed": Layout(2, {"exchange": "node"}, shadows=(1, 2)),
    "shared and latent": Layout(2, {"shared_expert_hidden": 3, "latent_size": 4}),
}


def make(gate, layout, group=None, **options):
    layer = FMoETransformerMLP(
        E // layout.num_ranks,
        D,
        12,
        gate=find_gate(gate) if isinstance(gate, str) else gate,
        world_size=layout.num_ranks,
        moe_group=group,
        **layout.options,
        **options,
    ).double()
    if layout.shadows:
        layer.expert_parallel.shadows = layout.shadows
    if isinstance(layer.gate, QuantileGate):
        layer.gate.update_bias()  # its buffers are float32 again
    return layer


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def train(layout, gate="naive", backend=None, sizes=SIZES):
    """A step of SGD for each number of tokens, one more on rank 1 -> outputs, losses, gradients, the state after."""
    torch.manual_seed(1)
    layer, seen = make(gate, layout), []

    def forward(x):
        return layer(x), total_loss(layer)

    step = forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for size in sizes:
        torch.manual_seed(size + rank())
        x = torch.randn(size + rank(), D, dtype=torch.float64, requires_grad=True)
        optimizer.zero_grad()
        y, loss = step(x)
        (y.square().sum() + loss).backward()
        grads = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        seen += [y.detach(), loss.detach(), x.grad, *grads]
        optimizer.step()
    return [*seen, *layer.state_dict().values()]


class Block(nn.Module):
    def __init__(self, gate, layout, group):
        super().__init__()
        self.moe = make(gate, layout, group, expert_dp_comm="moe")

    def forward(self, x):
        return x + self.moe(x)


def train_stages(layout, gate="naive", backend=None):
    """A step of a pipeline whose blocks are compiled each -> its loss and the gradients of this rank."""
    groups = init_groups(layout.num_stages, layout.num_ranks)
    torch.manual_seed(dist.get_rank(groups.ep))
    model = nn.Sequential(*(Block(gate, layout, groups.ep) for _ in range(2)))
    if backend is not None:
        for block in model:
            block.compile(fullgraph=True, backend=backend)
    x = torch.randn(8, D, dtype=torch.float64)
    pipeline = Pipeline(
        split(model, layout.num_stages, x[:2], by=[1, 1]),
        lambda output, target: (output - target).square().sum(),
        chunks=2,
        groups=groups,
        balance_weight=0.1,
        count=len,
    )
    torch.manual_seed(5)  # of gates that draw noise
    loss = pipeline.train_step(x, x.flip(0))
    return [loss.detach(), *(p.grad for p in pipeline.parameters() if p.grad is not None)]


def largest_difference(layout, gate, backend, sizes=SIZES):
    """Between a training that is compiled and one that is not."""
    torch.compiler.reset()
    run = train if layout.num_stages == 1 else train_stages
    options = {"sizes": sizes} if layout.num_stages == 1 else {}
    with torch._inductor.config.patch(fallback_random=True):  # eager's random numbers
        ours = run(layout, gate, backend, **options)
    theirs = run(layout, gate, None, **options)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


class Graphs:
    """A backend that counts the graphs that it compiles."""

    def __init__(self, backend="aot_eager"):
        self.backend = torch._dynamo.lookup_backend(backend)
        self.count = 0

    def __call__(self, graph, examples):
        self.count += 1
        return self.backend(graph, examples)


def on_ranks(pool, layout, function, *args):
    """function(layout, *args) on the ranks of a layout -> its result on the first."""
    world_size = layout.num_ranks * layout.num_stages
    if world_size == 1:
        return function(layout, *args)
    return pool.run(function, layout, *args, world_size=world_size, timeout=600)[0]
