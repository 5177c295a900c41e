"""exchange="node" on simulated nodes: the numbers of one process in every layout, a token once to each node."""

import copy
import functools
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.bench_ep import Wire
from fmoe_ext import FMoETransformerMLP, batch_invariant, valid_tokens
from fmoe_ext.distributed import init_groups
from fmoe_ext.ep import tuning
from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.placement import find_nodes
from fmoe_ext.ep.tuning import NUM_STEPS
from fmoe_ext.gates import SoftmaxGate
from fmoe_ext.planning.placement import rebalance
from fmoe_ext.testing import DistributedPool
from tests.distributed.layouts import D, assert_equal_training, ranks_per_node
from tests.distributed.test_layouts import OneExpert, make_gate
from tests.distributed.test_shadowing_placement import shadow_and_move
from tests.distributed.test_token_exchange import TwiceTheSame, assert_close, inputs, results
from tests.sweeps import rest_is_long

ROWS = {2: [5, 8], 4: [5, 0, 8, 3]}


def train(node_size, rows, ep, *cases):
    with ranks_per_node(node_size):
        for options, layout_options in cases:
            layout_options = {"exchange": "node", **layout_options}
            assert_equal_training(rows, steps=2, ep=ep, options=options, layout_options=layout_options)


@pytest.mark.parametrize(
    ("ep", "node_size"), rest_is_long([(4, 2), (4, 1), (4, 4), (2, 1)], [(4, 2), (2, 1)])
)
def test_training(pool, ep, node_size):
    """Float64 to 1e-12: losses, norms, all gradients, the gates' too; one rank has no tokens."""
    gshard = functools.partial(make_gate, "gshard", 2)
    dropping = functools.partial(make_gate, "softmax", 2)
    cases = [
        ({"top_k": 3}, {"overlap_degree": 2}),
        ({"top_k": 3, "experts": "separate"}, {}),
        ({"gate": TwiceTheSame}, {}),
        ({"gate": OneExpert}, {}),
        ({"gate": gshard}, {}),
        ({"gate": dropping}, {}),
        ({"top_k": 3, "shared_expert_hidden": 3, "latent_size": 3}, {}),
    ]
    pool.run(train, node_size, ROWS[4], ep, *cases, world_size=4)


def test_shadowed_and_moved_experts(pool):
    cases = [({"top_k": 3}, {"overlap_degree": 2, "between": shadow_and_move})]
    pool.run(train, 1, ROWS[2], 2, *cases, world_size=2)


def make(num_experts=8, size=1, group=None, **options):
    """The part of a layer of num_experts that this rank of size has; all parts are of one layer."""
    torch.manual_seed(7)
    whole = FMoETransformerMLP(
        num_experts, D, 5, **{"top_k": 3, "activation": "swiglu", **options.pop("both", {})}
    )
    whole = whole.double()
    if size > 1:
        whole.spread(group, **options)
    return whole


def laps():
    """The laps of a forward's parts, by a clock that each look moves on by one."""
    ticks = itertools.count()
    with ranks_per_node(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "_now", lambda device: next(ticks))
        layer = make(size=2, exchange="node", overlap_degree="auto")
        layer(torch.randn(5, D, dtype=torch.float64))
    return dict(layer.expert_parallel.tuner.watches["node"].steps[0])


def test_times_of_both_steps_are_told_apart(pool):
    """Chunks hide the exchange inside a node alone, with the latency of its messages."""
    expected = {"across": 3, "sort": 1, "counts": 1, "permute": 1, "exchange": 3, "compute": 1}
    assert pool.run(laps, world_size=2) == [expected] * 2


def batches(size, rows=9):
    generators = [torch.Generator().manual_seed(rank) for rank in range(size)]
    return [torch.randn(rows, D, dtype=torch.float64, generator=generator) for generator in generators]


def own_part(expected, layer, rank, size):
    """The results of one process for the tokens of all ranks, as far as a rank has them."""
    out, grad, *grads = expected
    names = [name for name, _ in layer.named_parameters()]
    total = [g.chunk(size)[rank] if "experts" in name else g for name, g in zip(names, grads, strict=True)]
    return [out.chunk(size)[rank], grad.chunk(size)[rank], *total]


def reduced(ours, layer):
    """Gradients of what all ranks have, summed over them."""
    for (name, _), grad in zip(layer.named_parameters(), ours[2:], strict=True):
        if "experts" not in name:
            dist.all_reduce(grad)
    return ours


def equals_one_process(node_size, overlap_degree, num_experts):
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = batches(size)
    valid = torch.arange(9 * size) % 3 != 1
    plain = make(num_experts)
    with ranks_per_node(node_size):
        layer = make(num_experts, size, exchange="node", overlap_degree=overlap_degree)
        for again in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            expected = own_part(results(plain, torch.cat(xs)), layer, rank, size)
            assert_close(reduced(results(again, xs[rank]), again), expected)
            for use_reentrant in (True, False):
                ours = results(again, xs[rank], checkpoint, use_reentrant=use_reentrant)
                assert_close(reduced(ours, again), expected)
        expected = own_part(results(plain, torch.cat(xs), valid=valid), layer, rank, size)
        mine = valid.chunk(size)[rank]
        assert_close(reduced(results(layer, xs[rank], valid=mine), layer), expected)
        with valid_tokens(mine):
            ours = results(layer, xs[rank], checkpoint, use_reentrant=False)
        assert_close(reduced(ours, layer), expected)


@pytest.mark.parametrize(("node_size", "overlap_degree"), [(2, 1), (2, 2), (1, 2), (4, 2)])
def test_recomputation_padding_and_copies(pool, node_size, overlap_degree):
    pool.run(equals_one_process, node_size, overlap_degree, 8, world_size=4)


@pytest.fixture(scope="module")
def eight():
    with DistributedPool(8) as pool:
        yield pool


@pytest.mark.parametrize("node_size", rest_is_long([4, 2], [2]))
def test_eight_ranks(eight, node_size):
    eight.run(equals_one_process, node_size, 2, 16)


def several_microbatches(rows, order):
    """Forwards of two microbatches, then their backwards in an order, recomputed; some rank has no tokens."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def train(layer, xs):
        layer.zero_grad()
        losses = [checkpoint(layer, x, use_reentrant=False).square().sum() for x in xs]
        for number in order:
            losses[number].backward()
        return [p.grad for p in layer.parameters()]

    torch.manual_seed(1)
    parts = [[torch.randn(n, D, dtype=torch.float64) for n in rows] for _ in range(2)]
    with ranks_per_node(2):
        plain, layer = make(), make(8, size, exchange="node", overlap_degree=2)
        expected = train(plain, [torch.cat(xs) for xs in parts])
        ours = train(layer, [xs[rank].requires_grad_() for xs in parts])
    for (name, _), a, b in zip(layer.named_parameters(), ours, expected, strict=True):
        if "experts" in name:
            b = b.chunk(size)[rank]
        else:
            dist.all_reduce(a)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("rows", [[5, 4, 3, 6], [5, 0, 3, 6]])
def test_repeated_microbatches(pool, rows, order):
    pool.run(several_microbatches, rows, order, world_size=4)


def moves_experts():
    """An expert's place says its node: rebalance() after a skewed load, then the numbers of one process again."""
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = batches(size)
    plain = make()
    with ranks_per_node(2):
        layer = make(8, size, exchange="node")
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        layer(xs[rank] + 2.0)
        rebalance(layer, optimizer)
        assert layer.expert_parallel.experts_in_place != list(range(8))
        out, grad = results(layer, xs[rank])[:2]
    expected = results(plain, torch.cat(xs))
    assert_close([out, grad], [t.chunk(size)[rank] for t in expected[:2]])


def test_moved_experts(pool):
    pool.run(moves_experts, world_size=4)


def bytes_of(exchange, top_k):
    """Of all ranks, in a forward and backward: bytes to other nodes; (token, other node) pairs, by hand."""
    size, rank, node_size = dist.get_world_size(), dist.get_rank(), 2
    with ranks_per_node(node_size):
        torch.manual_seed(3)
        layer = FMoETransformerMLP(8 // size, 64, 8, world_size=size, top_k=top_k, exchange=exchange)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    node_of = layer.gate(x)[0] // (8 // size * node_size)
    wire = dist.all_to_all_single = Wire(0, node_size)
    try:
        layer(x).sum().backward()
    finally:
        dist.all_to_all_single = wire.plain
    pairs = sum(
        (node_of == other).any(1).sum() for other in range(size // node_size) if other != rank // node_size
    )
    found = torch.stack([torch.tensor(wire.bytes_between_nodes), pairs])
    dist.all_reduce(found)
    return found.tolist()


def counts_bytes(top_k):
    row, (sent, pairs) = 4 * 64 * 4, bytes_of("node", top_k)
    messages = 4  # each rank has one peer on the other node, which it tells its number of rows
    assert sent == pairs * (row + top_k * (2 * 4 + 2)) + messages * (5 + 1) * 8
    by_token, _ = bytes_of("token", top_k)
    assert sent < 0.75 * by_token


def test_bytes(pool):
    pool.run(counts_bytes, 6, world_size=4)


def chooses():
    """ "auto" measures "node" where there are nodes of several ranks, and the numbers do not change."""
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = batches(size)
    with ranks_per_node(2):
        layer = make(8, size, exchange="auto", overlap_degree="auto")
    assert list(layer.expert_parallel.tuner.watches) == ["choice", "token", "node"]
    expected = own_part(results(make(), torch.cat(xs)), layer, rank, size)
    used = []
    for step in range(3 * NUM_STEPS + 1):
        if step == 3 * NUM_STEPS:
            for name, watch in layer.expert_parallel.tuner.watches.items():
                for laps in watch.steps:
                    laps.update(dict.fromkeys(laps, 0.0), exchange=float(name != "node"))
        assert_close(reduced(results(layer, xs[rank]), layer), expected)
        used.append(layer.expert_parallel._route.exchange)
    assert used == ["choice"] * NUM_STEPS + ["token"] * NUM_STEPS + ["node"] * (NUM_STEPS + 1)
    with ranks_per_node(1):
        one_each = make(8, size, init_groups(ep=4).ep, exchange="auto")
    assert list(one_each.expert_parallel.tuner.watches) == ["choice", "token"]


def test_auto(pool):
    pool.run(chooses, world_size=4)


def finds_nodes():
    assert find_nodes(dist.group.WORLD) == [[0, 1, 2, 3]]  # one host name
    with ranks_per_node(3):
        assert find_nodes(dist.group.WORLD) == [[0, 1, 2], [3]]
        with pytest.raises(
            ValueError, match=r"as many ranks of the group on every node, but they have \[3, 1\]"
        ):
            ExpertParallel(None, 2, exchange="node")
    with pytest.raises(ValueError, match="max_rows_per_rank is a number of rows for a rank"):
        ExpertParallel(None, 2, max_rows_per_rank=4, exchange="node")
    static = ExpertParallel(None, 2, max_rows_per_rank=4, exchange="auto")
    assert list(static.tuner.watches) == ["choice", "token"]
    with ranks_per_node(2):
        layer = make(8, 4, exchange="node", both={"gate": SoftmaxGate})
    with batch_invariant(), pytest.raises(RuntimeError, match="exchange='node' adds up"):
        layer(inputs())


def test_finds_nodes_and_rejects(pool):
    pool.run(finds_nodes, world_size=4)
