"""Pipeline over processes: the loss and gradients of one process, for every schedule, cut and layout."""

import functools
import itertools
import math
import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fmoe_ext
from fmoe_ext import checkpoint
from fmoe_ext.gates import WholeBatch, all_forwards_first, total_loss
from fmoe_ext.pipeline import SCHEDULES, Pipeline, init_groups, split
from fmoe_ext.testing import DistributedError, DistributedPool, run_distributed
from tests.sweeps import rest_is_long

VOCABULARY, D, ROWS, LENGTH = 11, 8, 10, 4
BALANCE = 0.3


def make_layers(ep=1, group=None):
    """Embedding, four MoE layers without residual, head; gates decide by each token alone and have a loss."""
    gate = functools.partial(fmoe_ext.GShardGate, capacity=(8.0, 8.0), random_routing=False)
    layers = [nn.Embedding(VOCABULARY, D)]
    for _ in range(4):
        moe = fmoe_ext.FMoETransformerMLP(
            4 // ep, D, 12, world_size=ep, moe_group=group, activation="gelu", gate=gate
        )
        moe.mark_parallel_comm("moe")
        layers += [nn.Linear(D, D), moe]
    return [*layers, nn.Linear(D, VOCABULARY, bias=False)]


def fill(model, whole):
    """The weights of the whole model, of which an expert-parallel layer takes its experts."""
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        rank = model.get_submodule(name.split(".")[0]).ep_rank if p.shape != q.shape else 0
        with torch.no_grad():
            p.copy_(q.narrow(0, rank * p.shape[0], p.shape[0]) if p.shape != q.shape else q)
    return model


def make_model(ep=1, group=None, tied=False):
    torch.manual_seed(3)
    whole = nn.Sequential(*make_layers()).double()
    model = whole if ep == 1 else fill(nn.Sequential(*make_layers(ep, group)).double(), whole)
    if tied:
        model[-1].weight = model[0].weight
    return model


def data(part=0, rows=ROWS):
    generator = torch.Generator().manual_seed(10 + part)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    target = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    target[: rows // 2, : part + 1] = -100  # ranks and microbatches count different numbers of tokens
    return tokens, target


def parts_of(rows, chunks):
    return [rows // chunks + (i < rows % chunks) for i in range(chunks)]


def alone(chunks, replicas=1, ep=1, tied=False, rows=ROWS):
    """(loss, {name: gradient}) of one process that accumulates the same microbatches; those of ep ranks are one."""
    model = make_model(tied=tied)
    batches = [data(part, rows) for part in range(replicas)]
    count = sum(int((target != -100).sum()) for _, target in batches)
    sizes, total = parts_of(rows, chunks), 0.0
    for first in range(0, replicas, ep):
        together = [[part.split(sizes) for part in batch] for batch in batches[first : first + ep]]
        for i, size in enumerate(sizes):
            if size == 0:
                continue
            x, y = (torch.cat([batch[what][i] for batch in together]) for what in (0, 1))
            loss = (
                F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
                / count
            )
            total += loss.item()
            (loss + BALANCE * size / rows * ep / replicas * total_loss(model)).backward()
    return total, {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}


def close(got, expected):
    scale = expected.abs().max().clamp(min=1e-3)
    return (got - expected).abs().max() <= 1e-12 * scale


def num_stages(schedule, ranks):
    return 2 * ranks if schedule in ("interleaved", "zero_bubble_v", "dualpipe_v") else ranks


def cut_for(stages):
    """MoE layers without residual end stages."""
    return {1: [10], 2: [5, 5], 4: [3, 2, 2, 3], 8: [2, 1, 1, 1, 1, 1, 1, 2]}[stages]


def train(schedule, chunks, pp, options=None, rows=ROWS):
    """(loss, {name: gradient} of this rank's parts) of two steps, the second after zero_grad."""
    options = dict(options or {})
    ep, tied = options.pop("ep", 1), options.pop("tied", False)
    groups = init_groups(pp, ep)
    model = make_model(ep, groups.ep if ep > 1 else None, tied)
    stages = num_stages(schedule, pp)
    parts = split(model, stages, data()[0], by=cut_for(stages))
    pipeline = Pipeline(
        parts, schedule=schedule, chunks=chunks, groups=groups, balance_weight=BALANCE, **options
    )
    tokens, target = data(dist.get_rank(groups.data), rows)
    pipeline.train_step(tokens, target)
    for p in pipeline.parameters():
        p.grad = None
    loss = pipeline.train_step(tokens, target, trace=True)
    if options.get("data_parallel") == "none":
        for p in pipeline.parameters():
            dist.all_reduce(p.grad, group=groups.data)
            p.grad /= dist.get_world_size(groups.data)
    spans = pipeline.spans()
    forwards = {(s.stage, s.microbatch) for s in spans if s.kind == "forward"}
    assert len(forwards) == stages * pipeline.num_microbatches
    assert {(s.stage, s.microbatch) for s in spans if s.kind == "backward"} == forwards
    assert all(
        s.stage > 0 for s in spans if s.kind == "weights"
    )  # the first stage's backward is in one piece
    assert abs(pipeline.evaluate(tokens, target) - loss) < 1e-12
    grads = {}
    for name, p in pipeline.module.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        grads[name] = (dist.get_rank(groups.ep), grad.clone())
    norm = pipeline.clip_grad_norm_(0.5)
    return loss.item(), grads, norm.item()


def check(results, expected, ep=1):
    loss, gradients = expected
    whole_norm = torch.cat([g.flatten() for g in {id(g): g for g in gradients.values()}.values()]).norm()
    seen = set()
    for got_loss, grads, norm in results:
        assert math.isclose(got_loss, loss, rel_tol=1e-12)
        assert math.isclose(norm, whole_norm, rel_tol=1e-10)
        for name, (rank, grad) in grads.items():
            whole = gradients[name]
            if grad.shape != whole.shape:
                whole = whole.narrow(0, rank * grad.shape[0], grad.shape[0])
            assert close(grad, whole), (name, (grad - whole).abs().max())
            seen.add(name)
    assert seen | ({"9.weight"} if gradients["0.weight"] is gradients["9.weight"] else set()) >= set(
        gradients
    )


CASES = list(itertools.product(SCHEDULES, (1, 2, 3, 8)))
FEW_CASES = [*itertools.product(SCHEDULES, (1, 3)), ("zero_bubble_v", 8)]


@pytest.mark.parametrize(("schedule", "chunks"), rest_is_long(CASES, FEW_CASES))
def test_schedules_equal_one_process(pool, schedule, chunks):
    check(pool.run(train, schedule, chunks, 2, world_size=2), alone(chunks))


LAYOUTS = {
    "dp": ("1f1b", {}),
    "ep": ("1f1b", {"ep": 2}),
    "ep_interleaved": ("interleaved", {"ep": 2}),
    "ep_zero_bubble": ("zero_bubble", {"ep": 2}),
    "ep_zero_bubble_v": ("zero_bubble_v", {"ep": 2}),
    "ep_dualpipe": ("dualpipe_v", {"ep": 2}),
    "ep_gpipe": ("gpipe", {"ep": 2, "checkpoint": True}),
    "ddp": ("1f1b", {"data_parallel": "ddp"}),
    "none": ("1f1b", {"data_parallel": "none"}),
    "fsdp": ("1f1b", {"data_parallel": "fsdp"}),
    "fsdp_interleaved": ("interleaved", {"data_parallel": "fsdp"}),
    "fsdp_zero_bubble": ("zero_bubble", {"data_parallel": "fsdp"}),
}


FEW_LAYOUTS = ("ep_interleaved", "ep_dualpipe", "ep_gpipe", "ddp", "none", "fsdp_zero_bubble")


@pytest.mark.parametrize("layout", rest_is_long(LAYOUTS, FEW_LAYOUTS))
def test_pipelines_side_by_side(pool, layout):
    schedule, options = LAYOUTS[layout]
    ep = options.get("ep", 1)
    check(pool.run(train, schedule, 3, 2, options, world_size=4), alone(3, replicas=2, ep=ep))


@pytest.mark.slow
def test_pipeline_data_and_expert_parallelism_together():
    """pp 2 x dp 2 x ep 2, on processes of their own."""
    expected = alone(3, replicas=4, ep=2)
    with DistributedPool(8) as eight:
        for schedule in ("1f1b", "zero_bubble", "dualpipe_v"):
            check(eight.run(train, schedule, 3, 2, {"ep": 2}, timeout=300), expected)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_checkpointed_and_tied(pool, schedule):
    options = {"checkpoint": True, "tied": True}
    check(pool.run(train, schedule, 4, 2, options, world_size=2), alone(4, tied=True))


@pytest.mark.parametrize("schedule", ["zero_bubble", "zero_bubble_v"])
def test_checkpointed_with_a_backward_in_two_parts(pool, schedule):
    """Microbatches of one size, each of which the two parts repeat: both with its own choices."""
    options = {"checkpoint": True}
    check(pool.run(train, schedule, 4, 2, options, 12, world_size=2), alone(4, rows=12))


def test_fewer_rows_than_chunks(pool):
    check(pool.run(train, "1f1b", 4, 2, None, 3, world_size=2), alone(4, rows=3))


def test_one_rank(pool):
    check(pool.run(train, "gpipe", 3, 1, world_size=1), alone(3))


def make_softmax_model():
    torch.manual_seed(5)
    layers = [nn.Embedding(VOCABULARY, D)]
    for _ in range(4):
        layers += [nn.Linear(D, D), fmoe_ext.FMoETransformerMLP(4, D, 12, gate=fmoe_ext.SoftmaxGate)]
    return nn.Sequential(*layers, nn.Linear(D, VOCABULARY, bias=False)).double()


def train_on_the_whole_batch(schedule, options):
    """Result of a step with the gates' losses of the whole batch."""
    tokens, target = data()
    parts = split(make_softmax_model(), num_stages(schedule, 2), tokens, by=cut_for(num_stages(schedule, 2)))
    pipeline = Pipeline(parts, schedule=schedule, chunks=3, balance_weight=BALANCE, **options)
    whole = WholeBatch(pipeline.module)
    with whole.first_pass():
        pipeline.evaluate(tokens, target)
    with whole.second_pass():
        loss = pipeline.train_step(tokens, target)
    grads = {name: p.grad for name, p in pipeline.module.named_parameters()}
    return loss.item(), pipeline.balance_loss.item(), grads


@pytest.mark.parametrize(
    ("schedule", "options"), [("1f1b", {}), ("gpipe", {"checkpoint": True}), ("dualpipe_v", {})]
)
def test_balance_loss_of_the_whole_batch(pool, schedule, options):
    model, (tokens, target) = make_softmax_model(), data()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
    balance = BALANCE * total_loss(model)
    (loss + balance).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    seen = set()
    for got in pool.run(train_on_the_whole_batch, schedule, options, world_size=2):
        assert math.isclose(got[0], loss.item(), rel_tol=1e-12)
        assert math.isclose(got[1], balance.item(), rel_tol=1e-12)
        assert all(close(grad, expected[name]) for name, grad in got[2].items())
        seen |= set(got[2])
    assert seen == set(expected)


class Pair(nn.Module):
    """A layer with a gate's loss that returns two tensors."""

    def __init__(self):
        super().__init__()
        self.moe, self.linear = (
            fmoe_ext.FMoETransformerMLP(4, D, 12, gate=fmoe_ext.SoftmaxGate),
            nn.Linear(D, D),
        )

    def forward(self, x):
        return self.moe(x), self.linear(x)


class Join(nn.Module):
    def forward(self, values):
        return values[0] * values[1]


def make_pairs():
    torch.manual_seed(6)
    return nn.Sequential(Pair(), nn.Sequential(Join(), nn.Linear(D, D))).double(), torch.randn(6, D).double()


def sum_of_squares(output, target):
    return (output - target).square().sum()


def train_pairs(schedule):
    model, x = make_pairs()
    parts = split(model, 2, x[:1], by=[1, 1])
    options = {"chunks": 2, "balance_weight": BALANCE, "count": len}
    pipeline = Pipeline(parts, sum_of_squares, schedule=schedule, **options)
    pipeline.train_step(x, x)
    return {name: p.grad for name, p in pipeline.module.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_balance_loss_counts_once_beside_several_tensors(pool, schedule):
    model, x = make_pairs()
    for part in x.chunk(2):
        loss = sum_of_squares(model(part), part) / len(x)
        (loss + BALANCE * total_loss(model) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    got = {
        name: grad for grads in pool.run(train_pairs, schedule, world_size=2) for name, grad in grads.items()
    }
    assert got.keys() == expected.keys()
    assert all(close(grad, expected[name]) for name, grad in got.items())


def train_inside_all_forwards_first():
    tokens, target = data()
    pipeline = Pipeline(
        split(make_softmax_model(), 2, tokens, by=cut_for(2)), chunks=3, balance_weight=BALANCE
    )
    with all_forwards_first(pipeline.module), pytest.raises(RuntimeError, match=r"use gates\.WholeBatch"):
        pipeline.train_step(tokens, target)
    return sum(p.grad is not None for p in pipeline.parameters())


def test_all_forwards_first_is_refused(pool):
    assert pool.run(train_inside_all_forwards_first, world_size=2) == [0, 0]


def save_here(folder, pp):
    pipeline = make_pipeline("1f1b", pp)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    pipeline.train_step(*data())
    optimizer.step()
    checkpoint.save(folder, pipeline.module, optimizer, step=1)
    return pipeline.evaluate(*data()).item()


def load_here(folder, schedule, pp):
    pipeline = make_pipeline(schedule, pp)
    with torch.no_grad():
        for p in pipeline.parameters():
            p.zero_()
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    assert checkpoint.load(folder, pipeline.module, optimizer).step == 1
    return pipeline.evaluate(*data()).item(), len(optimizer.state)


def make_pipeline(schedule, pp, **options):
    stages = num_stages(schedule, pp)
    parts = split(make_model(), stages, data()[0], by=cut_for(stages))
    return Pipeline(parts, schedule=schedule, groups=init_groups(pp), **options)


def test_checkpoint_loads_at_another_number_of_stages(pool, tmp_path):
    saved = pool.run(save_here, tmp_path, 2, world_size=2)
    for schedule, pp in (("zero_bubble_v", 2), ("gpipe", 1), ("1f1b", 4)):
        for loss, num_states in pool.run(load_here, tmp_path, schedule, pp, world_size=pp):
            assert math.isclose(loss, saved[0], rel_tol=1e-12) and num_states > 0
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(tmp_path, model)
    tokens, target = data()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
    assert math.isclose(loss.item(), saved[0], rel_tol=1e-12)


def die_in_a_step():
    pipeline = make_pipeline("1f1b", 2)
    pipeline.train_step(*data())
    if dist.get_rank() == 1:
        os._exit(7)
    pipeline.train_step(*data())


def test_pipeline_killed_rank_ends_the_others():
    begin = time.monotonic()
    with pytest.raises(DistributedError, match="rank 0: Traceback") as caught:
        run_distributed(die_in_a_step, 2, timeout=900)
    assert "exit code 7" in str(caught.value)
    assert time.monotonic() - begin < 300


def errors():
    """The text of each wrong call."""
    groups, model, sample = init_groups(2), make_model(), data()[0]
    two = split(model, 2, sample, by=[5, 5])
    four = split(model, 4, sample, by=cut_for(4))
    pipeline = Pipeline(two, groups=groups)
    calls = [
        lambda: split(model, 0, sample, by=[10]),
        lambda: split(model, 2, sample, by=[5, 4]),
        lambda: split(model, 2, sample, by="size"),
        lambda: split(model, 2, sample, by="load"),
        lambda: split(model, 2, sample, load={"0.gate": [1, 2]}),
        lambda: split(model, 2, [1, 2]),
        lambda: split(nn.Bilinear(2, 2, 2), 2, sample),
        lambda: Pipeline(two, schedule="fast", groups=groups),
        lambda: Pipeline(four, schedule="1f1b", groups=groups),
        lambda: Pipeline(two, schedule="dualpipe_v", groups=groups),
        lambda: Pipeline(two, chunks=0, groups=groups),
        lambda: Pipeline(two, chunks=2.5, groups=groups),
        lambda: Pipeline(two, balance_weight=-1, groups=groups),
        lambda: Pipeline(two, data_parallel="zero", groups=groups),
        lambda: Pipeline(four, schedule="interleaved", data_parallel="ddp", groups=groups),
        lambda: pipeline.train_step(sample, sample[:3]),
        lambda: pipeline.train_step((sample, sample[:3]), sample),
        lambda: Pipeline(two, count=len, groups=groups).train_step(sample, [1, 2]),
        lambda: init_groups(3),
    ]
    return [text_of(call) for call in calls]


def text_of(call):
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


ERRORS = (
    "stages must be between 1 and the 10 layers of the model, but got 0",
    "by must give each of the 2 stages at least one of the 10 layers, but got [5, 4]",
    "by must be one of 'time', 'memory', 'load' or the layers of each stage, not 'size'",
    'by="load" needs load={name of a gate: tokens_per_expert}',
    "load= is for by=\"load\", but by is 'time'",
    "sample must be a tensor or a tuple of tensors, but got list",
    "Bilinear cannot be cut: give an nn.Sequential",
    "schedule must be one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble', 'zero_bubble_v', 'dualpipe_v'",
    "schedule '1f1b' has one stage a rank: split the model into 2 stages, not 4",
    "schedule 'dualpipe_v' has two stages a rank: split the model into 4 stages for 2 ranks, not 2",
    "chunks must be a whole number of at least 1, but got 0",
    "chunks must be a whole number of at least 1, but got 2.5",
    "balance_weight must be a number of at least 0, but got -1",
    "data_parallel must be one of 'grouped', 'ddp', 'fsdp', 'none', but got 'zero'",
    "data_parallel=\"ddp\" is for one stage a rank and backwards in one piece ('gpipe' and '1f1b'), not for "
    "schedule 'interleaved'",
    "the target must have as many rows as the batch, 10",
    "the tensors of a batch must have equally many rows, but have [10, 3]",
    "the target of a pipeline must be a tensor or a tuple of tensors, but got list",
    "pp * ep must divide the number of ranks, 2, but got 3 * 1",
)


def test_errors(pool):
    for texts in pool.run(errors, world_size=2):
        assert len(texts) == len(ERRORS)
        for text, expected in zip(texts, ERRORS, strict=True):
            assert text.startswith(expected), (text, expected)


def other_shape():
    pipeline = make_pipeline("1f1b", 2)
    tokens, target = data()
    pipeline.train_step(tokens[:, :2], target[:, :2])


def test_another_shape_than_the_sample():
    with pytest.raises(DistributedError, match="a pipeline is for batches of the sample's shape"):
        run_distributed(other_shape, 2, timeout=60)
