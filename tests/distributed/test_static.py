"""max_rows_per_rank: the bits of the dynamic exchange, nothing read by the host, a passed bound never silent."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.ep.expert_parallel import LoadCounter
from fmoe_ext.ep.static import RowLimit, check_max_rows
from tests.distributed.layouts import D, E, K, assert_equal_training
from tests.distributed.test_layouts import OneExpert

READS_OF_THE_HOST = (
    "tolist",
    "item",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


class NoHostReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in READS_OF_THE_HOST, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def make(max_rows_per_rank=None, experts="fused", **options):
    torch.manual_seed(1)
    size = dist.get_world_size()
    options |= {"world_size": size, "max_rows_per_rank": max_rows_per_rank}
    if experts == "fused":
        return FMoETransformerMLP(E // size, D, 5, activation="swiglu", **options)
    return FMoE(E // size, D, expert=lambda d: torch.nn.Linear(d, d), **options)


def inputs(num_tokens):
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(num_tokens, D, generator=generator)
    return x.requires_grad_(), torch.randn(num_tokens, D, generator=generator)


def results(layer, num_tokens):
    x, weights = inputs(num_tokens)
    out = layer(x)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def most_rows(layer, num_tokens):
    """The most rows that a rank has for another: what max_rows_per_rank must be, on every rank."""
    topk_idx, _ = layer.gate(inputs(num_tokens)[0])
    to_rank = torch.bincount(topk_idx.flatten() // layer.num_expert, minlength=layer.world_size).max()
    dist.all_reduce(to_rank, dist.ReduceOp.MAX)
    return int(to_rank)


def equal_to_dynamic(cases):
    for rows in cases:
        for experts in ("fused", "separate"):
            num_tokens = rows[dist.get_rank()]
            dynamic = make(experts=experts)
            needed = most_rows(dynamic, num_tokens)
            expected = results(dynamic, num_tokens)
            for bound in (needed, max(rows) * K):  # exactly met, and always enough
                for ours, theirs in zip(results(make(bound, experts), num_tokens), expected, strict=True):
                    assert torch.equal(ours, theirs)
            too_little = make(needed - 1, experts)
            ranks = re.escape(str(list(range(len(rows)))))
            text = rf"of the group of ranks {ranks}: max_rows_per_rank is {needed - 1}, but rank \d has {needed} rows"
            with pytest.raises(RuntimeError, match=text):  # on every rank, before any row is sent
                results(too_little, num_tokens)


def test_equal_to_dynamic_up_to_the_bound(pool):
    pool.run(equal_to_dynamic, [[5, 8], [0, 9]], world_size=2)
    pool.run(equal_to_dynamic, [[5, 0, 8, 3]], world_size=4)


def train(rows, *all_options):
    for options in all_options:
        layout_options = {"max_rows_per_rank": max(rows) * K}
        assert_equal_training(rows, options=options, layout_options=layout_options)


def test_training(pool):
    pool.run(train, [7, 0], {}, {"gate": OneExpert}, {"experts": "separate"}, world_size=2)
    pool.run(train, [5, 0, 8, 3], {}, world_size=4)


def one_rank_passes_the_bound():
    """Rank 1 alone has 3 tokens, all for expert 1, where 2 are allowed."""
    rank = dist.get_rank()
    layer = make(2, gate=OneExpert, top_k=1)
    x = torch.ones(3 if rank == 1 else 2, D, requires_grad=True)
    text = r"^layer 0 of .* ranks \[0, 1\]: max_rows_per_rank is 2, but rank 1 has 3 rows for another rank$"
    with pytest.raises(RuntimeError, match=text):
        layer(x)
    check_max_rows(layer)

    layer.expert_parallel.row_limit.raises_at_once = False  # as on CUDA
    out = layer(x)
    assert out[:2].isnan().all()
    out.sum().backward()
    assert layer.gate.gate.weight.grad.isnan().any()
    assert all(p.grad.isnan().any() for p in layer.experts.parameters()) == (rank == 0)
    with pytest.raises(RuntimeError, match=text):
        check_max_rows(layer)
    assert layer(x[:2]).isfinite().all()
    check_max_rows(layer)


def ranks_in_different_layers():
    """As on CUDA: NaN now, the reason later."""
    layers = [make(4, gate=OneExpert, top_k=1) for _ in range(2)]
    for layer in layers:
        layer.expert_parallel.row_limit.raises_at_once = False
        layer(torch.ones(2, D))
    mine = layers[dist.get_rank()]
    assert mine(torch.ones(2, D)).isnan().all()
    with pytest.raises(RuntimeError, match="ranks did not exchange the same tokens in an earlier step"):
        check_max_rows(mine)
    check_max_rows(mine)


def test_one_rank_passes_the_bound(pool):
    pool.run(one_rank_passes_the_bound, world_size=2)
    pool.run(ranks_in_different_layers, world_size=2)


def nothing_read_by_the_host():
    layer = make(16)
    layer.expert_parallel.row_limit.raises_at_once = False  # as on CUDA
    expected = results(layer, 8)
    layer.zero_grad()
    with NoHostReads():
        ours = results(layer, 8)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    with pytest.raises(AssertionError, match="waits for the device"), NoHostReads():
        make()(inputs(8)[0])


def test_static_mode_reads_no_value_on_the_host(pool):
    pool.run(nothing_read_by_the_host, world_size=2)


def rejects():
    for options, text in (
        ({"max_rows_per_rank": 0}, "max_rows_per_rank must be at least 1 .*max_rows_per_rank=0"),
        ({"max_rows_per_rank": 4, "overlap_degree": 2}, "needs overlap_degree=1.*overlap_degree=2"),
        ({"overlap_degree": 0}, 'overlap_degree must be at least 1, or "auto", but got 0'),
        ({"overlap_degree": "all"}, "overlap_degree must be at least 1, or \"auto\", but got 'all'"),
    ):
        with pytest.raises(ValueError, match=text):
            make(**options)


def test_rejects(pool):
    pool.run(rejects, world_size=2)


def test_counters_that_begin_in_inference_mode_go_on_in_training():
    """On a GPU both make their tensor in the first forward: on the meta device as there."""
    limit, load = RowLimit(3, 0, [0, 1]), LoadCounter(E)
    headers, counts = torch.zeros(2, 4, dtype=torch.int64), torch.ones(E, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        assert not limit.note(torch.tensor([1, 3]), headers)
        load.add(counts)
    assert limit.note(torch.tensor([2, 4]), headers)
    load.add(counts)
