"""Blocks that torch.compile compiled, inside stages: loss and gradients of blocks that are not, in every schedule."""

import pytest
import torch
import torch._functorch.config
from torch import nn

import fmoe_ext
from fmoe_ext.pipeline import SCHEDULES, Pipeline, init_groups, split
from fmoe_ext.testing import DistributedError, run_distributed

D, ROWS, CHUNKS = 8, 7, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = fmoe_ext.FMoETransformerMLP(4, D, 12, activation="swiglu", gate="softmax")

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def train(schedule, checkpoint, backend=None):
    """(loss, gradients of this rank) of the second of two steps; microbatches of 3, 2 and 2 rows."""
    torch.manual_seed(5)
    model = nn.Sequential(*(Block() for _ in range(4))).double()
    for block in model:
        if backend is not None:
            block.compile(backend=backend)
    x = torch.randn(ROWS, D, dtype=torch.float64)
    stages = 4 if schedule in ("interleaved", "zero_bubble_v", "dualpipe_v") else 2
    pipeline = Pipeline(
        split(model, stages, x[:2], by=[4 // stages] * stages),
        lambda output, target: (output - target).pow(2).sum(),
        schedule=schedule,
        chunks=CHUNKS,
        groups=init_groups(2),
        balance_weight=0.1,
        checkpoint=checkpoint,
        count=len,
    )
    for _ in range(2):
        for p in pipeline.parameters():
            p.grad = None
        loss = pipeline.train_step(x, x.flip(0))
    return loss, {name: p.grad for name, p in pipeline.module.named_parameters()}


def both(schedule, checkpoint):
    """train() of plain and of compiled blocks, and how many graphs were compiled."""
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, examples)

    plain = train(schedule, checkpoint)
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        return plain, train(schedule, checkpoint, backend), len(graphs)


LONG = pytest.param("1f1b", False, marks=pytest.mark.long)
SLOW = [*((schedule, False) for schedule in SCHEDULES if schedule != "1f1b"), ("1f1b", True)]
CASES = [("zero_bubble_v", True), LONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("schedule", "checkpoint"), CASES)
def test_equal_to_plain_blocks(pool, schedule, checkpoint):
    for (loss, grads), (other_loss, others), graphs in pool.run(both, schedule, checkpoint, world_size=2):
        assert graphs > 0
        torch.testing.assert_close(other_loss, loss, rtol=1e-12, atol=0)
        assert grads.keys() == others.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(others[name], grad, rtol=1e-12, atol=1e-14)


@pytest.mark.long
def test_compiled_backward_in_parts_names_the_setting():
    with pytest.raises(DistributedError, match=r"set torch._functorch\.config\.donated_buffer = False"):
        run_distributed(train, 2, "zero_bubble", False, "aot_eager", timeout=120)
