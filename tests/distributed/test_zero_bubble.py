"""torch's zero-bubble schedules over stages of experts: the gradients of one process, each product computed once."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_pipeline import alone as pipeline_alone
from test_pipeline import check, train
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.utils._python_dispatch import TorchDispatchMode

from fmoe_ext import ops
from fmoe_ext.pipeline import trace

STAGES, MICROBATCHES, D = 4, 4, 12


class Experts(torch.nn.Module):
    """A stage: experts with a residual, every token to two of four."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"w1": (4, 20, D), "b1": (4, 20), "w2": (4, D, 20), "b2": (4, D)}
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator).double() * 0.3))
        self.gate = torch.nn.Parameter(torch.randn(D, 4, generator=generator).double())

    def forward(self, x):
        topk_idx, weights = ops.topk_gate(x @ self.gate, 2)
        order = ops.sort_tokens(topk_idx, 4)
        rest = (self.w1, self.b1, self.w2, self.b2, weights)
        return x + ops.expert_mlp(x, order.row_idx, order.inverse, order.offs, *rest)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fmoe_ext":
            self.count[op._opname] = self.count.get(op._opname, 0) + 1
        return op(*args, **(kwargs or {}))


def data():
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(MICROBATCHES * 6, D, generator=generator).double() for _ in range(2))


def loss_of(y, target):
    return (y * target).sum()


def alone():
    stages = [Experts(seed) for seed in range(STAGES)]
    for x, target in zip(*(t.split(6) for t in data()), strict=True):
        loss_of(torch.nn.Sequential(*stages)(x), target).backward()
    return [[p.grad for p in stage.parameters()] for stage in stages]


def step(name):
    """{stage: its gradients} of this rank, and how often each operator was called."""
    schedule, places = {
        "interleaved": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
        "v": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
    }[name]
    mine = places[dist.get_rank()]
    modules = {place: Experts(place) for place in mine}
    stages = [PipelineStage(modules[place], place, STAGES, torch.device("cpu")) for place in mine]
    x, target = data()
    schedule = schedule(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    given = [x] if 0 in mine else []
    options = {"target": target if STAGES - 1 in mine else None}
    schedule.step(*given, **options)  # the first step also runs every stage once to learn its shapes
    for module in modules.values():
        module.zero_grad()
    with Calls() as calls:
        schedule.step(*given, **options)
    return {place: [p.grad for p in module.parameters()] for place, module in modules.items()}, calls.count


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11's own stage frees nodes that the second part of a backward needs",
)
@pytest.mark.parametrize("name", ["interleaved", "v"])
def test_gradients_and_calls(pool, name):
    expected, halves = alone(), 0
    for gradients, calls in pool.run(step, name, world_size=2):
        for place, got in gradients.items():
            assert all(torch.equal(a, b) for a, b in zip(got, expected[place], strict=True)), place
        whole = calls.get("expert_mlp_backward", 0)
        inputs, weights = (calls.get(f"expert_mlp_backward_{half}", 0) for half in ("inputs", "weights"))
        assert inputs == weights and whole + inputs == calls["expert_mlp"] == 2 * MICROBATCHES
        halves += inputs
    assert halves >= 2 * MICROBATCHES  # torch runs the first stage's backward whole


def train_as_with_old_torch(schedule):
    with (
        mock.patch.object(trace, "IS_WRONG_IN_PARTS", True),
        mock.patch.object(PipelineStage, "backward_weight_one_chunk", side_effect=AssertionError("in parts")),
    ):
        return train(schedule, 4, 2)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v", "dualpipe_v"])
def test_old_torch_computes_each_backward_whole(pool, schedule):
    check(pool.run(train_as_with_old_torch, schedule, world_size=2), pipeline_alone(4))


def messages_to_neighbours():
    """Of the second of three stages: the first one is on this rank too, as in a V, the third one on the other."""
    stage = trace.TimedStage(torch.nn.Identity(), 1, 3, torch.device("cpu"))
    own = dist.get_rank()
    stage.stage_index_to_group_rank = {0: own, 1: own, 2: 1 - own}
    return [op.peer for op in stage._get_init_p2p_neighbors_ops()]


def test_rank_sends_nothing_to_itself(pool):
    assert pool.run(messages_to_neighbours, world_size=2) == [[1, 1], [0, 0]]
