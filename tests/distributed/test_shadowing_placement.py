"""Shadowed and moved experts train as in one process; plans are what brute force and the cost model say."""

import functools
import itertools
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.ep.cost import Hardware, Layer, step_time
from fmoe_ext.ep.shadowing import choose_shadows, update_shadows
from fmoe_ext.planning.placement import imbalance, move_experts, plan, rebalance
from tests.distributed.layouts import D, assert_equal_training, ranks_per_node
from tests.distributed.test_layouts import OneExpert
from tests.sweeps import rest_is_long


def shadow_some(model, optimizer, step):
    for number, layer in enumerate(model.moe):
        layer.expert_parallel.shadows = [(), (2,), (1, 3), (0, 1, 2, 3)][(step + number) % 4]


def move_some(model, optimizer, step):
    orders = [[0, 1, 2, 3], [2, 1, 0, 3], [3, 2, 1, 0], [1, 0, 2, 3]]
    for number, layer in enumerate(model.moe):
        move_experts(layer, orders[(step + number) % 4], optimizer)


def shadow_and_move(model, optimizer, step):
    move_some(model, optimizer, step)
    shadow_some(model, optimizer, step)


CHANGES = [shadow_some, move_some, shadow_and_move]


@pytest.mark.parametrize("between", rest_is_long(CHANGES, [shadow_and_move]))
@pytest.mark.parametrize(
    ("world_size", "slice_", "rows"), [(2, 1, [5, 8]), (4, 1, [5, 0, 8, 3]), (4, 2, [5, 8])]
)
def test_training(pool, between, world_size, slice_, rows):
    run = functools.partial(
        assert_equal_training,
        rows,
        steps=5,
        ep=2,
        slice_=slice_,
        layout_options={"between": between, "overlap_degree": 2},
    )
    pool.run(run, world_size=world_size)


def decide(model, optimizer, step):
    if step:
        fast = Hardware(bandwidth=1.0, throughput=1.0)
        assert set(update_shadows(model, fast).values()) == {(1,)}  # expert 1 has all tokens


def move_by_load(model, optimizer, step):
    if step == 1:
        before = [p.detach().clone() for p in model.moe.parameters()]
        assert rebalance(model, optimizer) == 0  # one expert's load cannot be split
        assert all(torch.equal(p, q) for p, q in zip(model.moe.parameters(), before, strict=True))


@pytest.mark.parametrize("between", [decide, move_by_load])
def test_decided_from_load(pool, between):
    run = functools.partial(
        assert_equal_training, [40, 30], options={"gate": OneExpert}, layout_options={"between": between}
    )
    pool.run(run, world_size=2)


def checkpoint_with_moved_experts():
    torch.manual_seed(0)
    make = functools.partial(FMoETransformerMLP, 2, D, 5, world_size=2)
    layer, other = make(), make()
    x = torch.randn(7, D)
    expected = layer(x)
    assert not any("placement" in key for key in layer.state_dict())
    move_experts(layer, [3, 1, 0, 2])
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-7)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    layer.load_state_dict(make().state_dict())  # of experts in order
    assert layer.expert_parallel.experts_in_place == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="each of the 4 experts once"):
        move_experts(layer, [0, 0, 1, 2])
    measured = Hardware.measure()
    everyone = [None, None]
    dist.all_gather_object(everyone, measured)
    assert everyone[0] == everyone[1] and measured.bandwidth > 1e6 and measured.throughput > 1e8


def numbers_of_fastmoe():
    os.environ.update(FMOE_FASTER_GLBPLC_NETBW="6.25e9", FMOE_FASTER_GLBPLC_GPUTP="11.5e12")
    try:
        measured = Hardware.measure(None, Layer(8, 8), rows=64)
        assert (measured.bandwidth, measured.throughput) == (6.25e9, 11.5e12)
        del os.environ["FMOE_FASTER_GLBPLC_GPUTP"]
        measured = Hardware.measure(None, Layer(8, 8), rows=64)
        assert measured.bandwidth == 6.25e9 and 0 < measured.throughput != 11.5e12
    finally:
        os.environ.pop("FMOE_FASTER_GLBPLC_NETBW")
        os.environ.pop("FMOE_FASTER_GLBPLC_GPUTP", None)


def measured_on():
    layer = FMoETransformerMLP(2, D, 5, world_size=2).to("meta")
    fast = Hardware(bandwidth=1e9, throughput=1e12)
    with mock.patch.object(Hardware, "measure", return_value=fast) as measure:
        update_shadows(layer)
    return measure.call_args.args[-1]


def test_hardware_is_measured_where_the_experts_are(pool):
    """A group of gloo carries experts of a GPU too."""
    assert pool.run(measured_on, world_size=2) == [torch.device("meta")] * 2


def test_numbers_of_fastmoe(pool):
    pool.run(numbers_of_fastmoe, world_size=2)


def test_checkpoint_with_moved_experts(pool):
    pool.run(checkpoint_with_moved_experts, world_size=2)


def factored_state_moves():
    """State with one number an expert and row, as Adafactor's (thu-pacman/SmartMoE-AE#3)."""
    layer, first = FMoETransformerMLP(2, D, 5, world_size=2), 2 * dist.get_rank()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for p in layer.experts.parameters():
        row = torch.zeros(2, p.shape[1], *[1] * (p.dim() - 2))
        row += torch.arange(first, first + 2.0).view(2, *[1] * (p.dim() - 1))
        optimizer.state[p] = {"step": torch.tensor(3.0), "row": row}
    move_experts(layer, [3, 1, 0, 2], optimizer)
    for p in layer.experts.parameters():
        state = optimizer.state[p]
        assert state["row"].flatten(1)[:, 0].tolist() == [3, 1, 0, 2][first : first + 2]
        assert state["step"] == 3
        state["column"] = torch.zeros(1, p.shape[1])
    with pytest.raises(ValueError, match=r"state 'column' \[1, .* is one for several of them"):
        move_experts(layer, [0, 1, 2, 3], optimizer)
    assert layer.expert_parallel.experts_in_place == [3, 1, 0, 2]


def test_factored_state_of_an_optimizer_moves(pool):
    pool.run(factored_state_moves, world_size=2)


def test_plan_is_near_the_best():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        load = torch.randint(0, 100, (6,), generator=generator).tolist()
        ours = imbalance(load, 2, plan(load, 2))
        best = min(imbalance(load, 2, order) for order in itertools.permutations(range(6)))
        assert ours <= 4 / 3 * best
    assert plan([10, 1, 10, 1], 2) == [0, 1, 2, 3]  # nothing to gain, nothing moves
    assert plan([10, 10, 1, 1], 2, [0, 1, 2, 3]) in ([0, 3, 2, 1], [0, 2, 1, 3], [0, 3, 1, 2], [0, 2, 3, 1])


def test_step_time_by_hand():
    layer, hardware = Layer(d_model=2, d_hidden=3), Hardware(bandwidth=10.0, throughput=100.0)
    # rank 0 gets 8 rows, rank 1 gets 2; half of them come from the other rank
    time = step_time([5, 3, 1, 1], 2, layer, hardware)
    assert time.exchange == pytest.approx(4 * 4 * 8 / 10) and time.compute == pytest.approx(8 * 3 * 24 / 100)
    # expert 0 everywhere: 2.5 rows of it on each rank, its 48 bytes of parameters there and back
    time = step_time([5, 3, 1, 1], 2, layer, hardware, shadows=(0,))
    assert time.exchange == pytest.approx(4 * 1.5 * 8 / 10) and time.compute == pytest.approx(5.5 * 72 / 100)
    assert time.shadowing == pytest.approx(2 * 48 / 10)
    assert time.overlapped(1) == time.total
    assert time.overlapped(2) == pytest.approx(time.total - min(time.exchange, time.compute) / 2)


def test_step_time_of_nodes_by_hand():
    """Four ranks with 12 tokens in all, of two choices each, on two nodes."""
    rows, layer = [8, 8, 4, 4], Layer(d_model=2, d_hidden=3, top_k=2)
    speeds = {"latency": 0.5, "ranks_per_node": 2, "node_bandwidth": 2.0, "node_latency": 0.25}
    hardware = Hardware(10.0, 100.0, **speeds)

    def exchange(kind, **changes):
        return step_time(rows, 4, replace(layer, exchange=kind), replace(hardware, **changes)).exchange

    # half of the 8 rows of 8 bytes come from the other node
    assert exchange("choice") == pytest.approx(4 * (4 * 8 / 2 + 0.25))
    # a quarter comes from the rank beside it
    assert exchange("choice", node_bandwidth=1e9) == pytest.approx(4 * (2 * 8 / 10 + 0.5))
    assert exchange("choice", ranks_per_node=4) == exchange("choice", ranks_per_node=None)
    on_busiest = 12 * (1 - (2 / 3) ** 2)  # tokens with a choice on a rank that a third of them chose
    assert exchange("token") == pytest.approx(4 * (on_busiest / 2 * 8 / 2 + 0.25))
    on_node = 12 * (1 - (1 / 3) ** 2) / 2  # for each of its ranks
    inside = on_busiest / 2 * 8 / 10 + 0.5
    assert exchange("node") == pytest.approx(4 * (on_node / 2 * 8 / 2 + 0.25 + inside))
    moved = step_time(rows, 4, layer, hardware, shadows=(0,)).shadowing
    assert moved == pytest.approx(2 * layer.expert_bytes / 2.0)
    assert step_time([0, 0, 0, 0], 4, replace(layer, exchange="node"), hardware).compute == 0


def measures_nodes():
    layer = Layer(16, 8, num_matrices=3, bytes_per_element=2)
    flat = Hardware.measure(None, layer, rows=64, num_experts=2)
    assert flat.ranks_per_node is None and flat.node_bandwidth == float("inf") and flat.latency >= 0
    for size in (2, 1):
        with ranks_per_node(size):
            measured = Hardware.measure(None, layer, rows=64, num_experts=2)
        everyone = [None] * 4
        dist.all_gather_object(everyone, measured)
        assert everyone == [measured] * 4 and measured.ranks_per_node == size
        assert 0 < measured.node_bandwidth < float("inf") and 0 < measured.throughput < 1e15
        assert (measured.bandwidth == measured.node_bandwidth) == (size == 1)


def test_measures_links_inside_and_between_nodes(pool):
    pool.run(measures_nodes, world_size=4)


def measures_unequal_nodes():
    with ranks_per_node(2):  # ranks 0 and 1, and rank 2 alone
        measured = Hardware.measure(None, Layer(16, 8), rows=64)
    everyone = [None] * 3
    dist.all_gather_object(everyone, measured)
    assert everyone == [measured] * 3 and measured.ranks_per_node == 1


def test_ranks_of_unequal_nodes_decide_by_the_same_numbers(pool):
    pool.run(measures_unequal_nodes, world_size=3)


def test_choose_shadows():
    layer, hardware = Layer(4, 8), Hardware(bandwidth=1e3, throughput=1e9)
    assert choose_shadows([1000, 1, 1, 1], 4, layer, hardware) == (0,)
    assert choose_shadows([2, 2, 2, 2], 4, layer, hardware) == ()
    assert choose_shadows([1000, 999, 1, 1], 4, layer, hardware, max_shadows=0) == ()
