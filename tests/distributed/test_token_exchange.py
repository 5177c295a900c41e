"""exchange="token": the numbers of one process in every layout, fewer bytes, "auto" chosen alike on all ranks."""

import functools
import logging

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.bench_ep import Wire
from fmoe_ext import FMoETransformerMLP, batch_invariant
from fmoe_ext.ep.tuning import NUM_STEPS
from fmoe_ext.gates import NaiveGate, SoftmaxGate
from tests.distributed.layouts import D, E, assert_equal_training
from tests.distributed.test_layouts import OneExpert, make_gate
from tests.distributed.test_overlap import Records
from tests.distributed.test_shadowing_placement import shadow_and_move

ROWS = {2: [5, 8], 4: [5, 0, 8, 3]}


class TwiceTheSame(NaiveGate):
    """Each token's choices are its first expert, again and again."""

    def forward(self, x):
        topk_idx, topk_weights = super().forward(x)
        return topk_idx[:, :1].expand_as(topk_idx), topk_weights


def train(rows, ep, *cases):
    for options, layout_options in cases:
        layout_options = {"exchange": "token", **layout_options}
        assert_equal_training(rows, steps=2, ep=ep, options=options, layout_options=layout_options)


def test_two_ranks(pool):
    """Float64 to 1e-12: losses, norms, all gradients, the gates' too."""
    gshard = functools.partial(make_gate, "gshard", 2)
    dropping = functools.partial(make_gate, "softmax", 2)
    cases = [
        ({"top_k": 3}, {}),
        ({"top_k": 4}, {"overlap_degree": 2}),
        ({"top_k": 3, "experts": "separate"}, {"overlap_degree": 2}),
        ({"top_k": 3}, {"max_rows_per_rank": 8}),
        ({"top_k": 3}, {"overlap_degree": "auto"}),
        ({"gate": TwiceTheSame}, {}),
        ({"gate": OneExpert}, {}),
        ({"gate": gshard}, {}),
        ({"gate": dropping}, {}),
        ({"top_k": 3, "shared_expert_hidden": 3}, {"exchange": "auto"}),
    ]
    pool.run(train, ROWS[2], 2, *cases, world_size=2)


def test_rank_without_tokens(pool):
    cases = [({"top_k": 3}, {}), ({"top_k": 3}, {"max_rows_per_rank": 7})]
    pool.run(train, [7, 0], 2, *cases, world_size=2)


@pytest.mark.parametrize("ep", [2, 4])
def test_four_ranks(pool, ep):
    pool.run(train, ROWS[4], ep, ({"top_k": 3}, {"overlap_degree": 2}), world_size=4)


def test_shadowed_and_moved_experts(pool):
    run = functools.partial(
        assert_equal_training,
        ROWS[2],
        steps=4,
        options={"top_k": 3},
        layout_options={"exchange": "token", "overlap_degree": 2, "between": shadow_and_move},
    )
    pool.run(run, world_size=2)


def make(num_local=2, **options):
    torch.manual_seed(7)
    options = {"world_size": dist.get_world_size(), "top_k": 3, **options}
    return FMoETransformerMLP(num_local, D, 5, **options).double()


def inputs(rows=9):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows, D, dtype=torch.float64, generator=generator)


def results(layer, x, wrap=lambda f, x, **kw: f(x, **kw), **kwargs):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = wrap(layer, x, **kwargs)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def padded_and_repeated():
    x, valid = inputs(), torch.arange(9) % 3 != dist.get_rank()
    expected = results(make(), x, valid=valid)
    assert_close(results(make(exchange="token"), x, valid=valid), expected)
    expected = results(make(), x)
    auto = make(exchange="auto")
    for _ in range(2 * NUM_STEPS):  # a forward and its repetition may stand on either side of the choice
        for use_reentrant in (True, False):
            assert_close(results(auto, x, checkpoint, use_reentrant=use_reentrant), expected)
    assert auto.expert_parallel.tuner is None


def test_padding_and_recomputation(pool):
    pool.run(padded_and_repeated, world_size=2)


def pretend(tuner, seconds):
    for name, watch in tuner.watches.items():
        for step in watch.steps:
            assert set(step) == {"sort", "counts", "permute", "exchange", "compute"}
            step.update(dict.fromkeys(step, 0.0), exchange=seconds[name])


def chooses_alike(faster, overlap_degree):
    rank, layer = dist.get_rank(), make(exchange="auto", overlap_degree=overlap_degree)
    logger, records = logging.getLogger("fmoe_ext.ep.tuning"), Records()
    logger.addHandler(records)
    logger.setLevel(logging.INFO)
    expected = results(make(), inputs())
    used = []
    for step in range(2 * NUM_STEPS + 2):
        if step == 2 * NUM_STEPS:
            slow = {name: 1.0 + (name != faster) * rank for name in ("choice", "token")}  # on one rank
            pretend(layer.expert_parallel.tuner, slow)
        assert_close(results(layer, inputs()), expected)
        used.append(layer.expert_parallel._route.exchange)
    assert used == ["choice"] * NUM_STEPS + ["token"] * NUM_STEPS + [faster] * 2
    assert any(f'exchange="auto" is "{faster}" (' in text for text in records.texts) == (rank == 0)


@pytest.mark.parametrize(
    ("faster", "overlap_degree"), [("choice", 1), ("token", "auto")], ids=["choice", "token"]
)
def test_auto(pool, faster, overlap_degree):
    pool.run(chooses_alike, faster, overlap_degree, world_size=2)


def bytes_of(exchange, top_k):
    """Of all ranks, in a forward and backward: bytes sent; (token, other rank) pairs and choices away, by hand."""
    size, rank = dist.get_world_size(), dist.get_rank()
    layer = FMoETransformerMLP(8 // size, 64, 8, world_size=size, top_k=top_k, exchange=exchange)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    rank_of = layer.gate(x)[0] // (8 // size)
    wire = dist.all_to_all_single = Wire(0)
    try:
        layer(x).sum().backward()
    finally:
        dist.all_to_all_single = wire.plain
    pairs = sum((rank_of == other).any(1).sum() for other in range(size) if other != rank)
    found = torch.stack([torch.tensor(wire.bytes_sent), pairs, (rank_of != rank).sum()])
    dist.all_reduce(found)
    return found.tolist()


def counts_bytes(top_k):
    size = dist.get_world_size()
    row, messages = (
        4 * 64 * 4,
        size * (size - 1),
    )  # a row goes there and back, in the forward and in the backward
    num_bytes, _, choices = bytes_of("choice", top_k)
    assert num_bytes == choices * (row + 2 * 4) + messages * (5 + 8 // size) * 8
    num_bytes, pairs, choices = bytes_of("token", top_k)
    assert num_bytes == pairs * (row + top_k * (2 * 4 + 2)) + messages * (5 + 1) * 8
    assert pairs < choices


@pytest.mark.parametrize(("world_size", "top_k"), [(2, 2), (4, 6)])
def test_bytes(pool, world_size, top_k):
    pool.run(counts_bytes, top_k, world_size=world_size)


def rejects():
    with pytest.raises(
        ValueError, match='exchange must be "choice", "token", "node" or "auto", but got \'tokens\''
    ):
        make(exchange="tokens")
    with pytest.raises(
        ValueError, match=r"max_rows_per_rank, exchange, wire\) must be the same on ranks \[0, 1\]"
    ):
        make(exchange=["token", "choice"][dist.get_rank()])(inputs())
    layer = make(exchange="token", gate=SoftmaxGate)
    with batch_invariant(), pytest.raises(RuntimeError, match="exchange='token' adds up"):
        layer(inputs())
    torch.manual_seed(0)
    bound = make(exchange="token", max_rows_per_rank=3, top_k=E)
    with pytest.raises(RuntimeError, match="max_rows_per_rank is 3, but rank 0 has 4 rows"):
        bound(inputs(4))
    results(bound, inputs(3))


def test_rejects(pool):
    pool.run(rejects, world_size=2)
