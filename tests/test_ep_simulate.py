"""The simulator: what it prints follows from the cost model on loads that can be worked out by hand."""

import json
from dataclasses import replace
from math import comb

import pytest
import torch

from benchmarks import published_clusters
from fmoe_ext import balance
from fmoe_ext.ep.cost import Hardware, Layer, step_time
from fmoe_ext.gates import NaiveGate
from fmoe_ext.planning.simulate import draw_loads, main, read_loads, simulate

LAYER = Layer(64, 128)
HARDWARE = Hardware(bandwidth=1e9, throughput=1e12)


def test_even_loads_gain_only_from_overlap():
    """A rank has 2 experts, and so 2 chunks."""
    large = Layer(64, 4096)  # too large to be broadcast for 100 rows
    times = simulate([[100] * 8] * 6, 4, large, HARDWARE, num_chunks=4, every=3)
    plain = step_time([100] * 8, 4, large, HARDWARE)
    assert times["none"] == pytest.approx(plain.total)
    assert times["shadowing"] == times["placement"] == times["none"]
    assert times["overlap"] == pytest.approx(times["all"])
    assert times["overlap"] == times["all"] == pytest.approx(plain.overlapped(2))


def test_placement_pays_from_the_step_after_its_move():
    load = [300, 300, 0, 0]  # both busy experts on rank 0, until one of them moves
    times = simulate([load] * 40, 2, LAYER, HARDWARE, num_chunks=1, every=20)
    before, after = (step_time(x, 2, LAYER, HARDWARE).total for x in (load, [300, 0, 300, 0]))
    move = LAYER.expert_bytes * 3 / HARDWARE.bandwidth
    assert times["placement"] == pytest.approx((20 * before + 20 * after + move) / 40)


def test_drawn_loads():
    loads = draw_loads(5, 16, 1000, skew=1.0)
    assert all(abs(sum(load) - 1000) < 150 and max(load) > 3 * 1000 / 16 for load in loads)
    assert loads == draw_loads(5, 16, 1000, skew=1.0)
    assert len(draw_loads(2, 1, 10, skew=1.0)[1]) == 1


def test_drawn_loads_keep_their_sum_while_experts_swap():
    sums = [sum(load) for load in draw_loads(40, 1000, 10**6, skew=1.5)]
    assert all(abs(total - 10**6) < 6000 for total in sums)  # six standard deviations of a Poisson sum


@pytest.mark.parametrize("name", sorted(published_clusters.CLUSTERS))
def test_published_clusters_print_their_gains(name, capsys):
    published_clusters.main([name, "--steps", "3"])
    printed = capsys.readouterr().out
    assert published_clusters.CLUSTERS[name].gains in printed and "overlap + shadowing" in printed


def test_gated_experts_take_three_matrices(tmp_path, capsys):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[5, 3, 1, 1]] * 2))
    main(["--loads", str(path), "--ranks", "2", "--network", "nvlink", "--gated"])
    gated = Layer(2048, 4096, num_matrices=3, bytes_per_element=2)
    expected = step_time([5, 3, 1, 1], 2, gated, Hardware(0.8 * 450e9, 400e12)).total
    assert f"{expected * 1e3:10.3f}" in capsys.readouterr().out.splitlines()[1]


QWEN3 = "--tokens 8192 --d-model 2048 --d-hidden 768 --gated --top-k 8 --skew 0 --network nvlink --latency 20"
FOUR_NODES = "--ranks 32 --experts-per-rank 4 --ranks-per-node 8 --node-network ib-ndr --node-latency 40"


def of_groups(size):
    """Share of tokens that choose one of so many of 128 experts, 8 without repetition."""
    return 1 - comb(128 - size, 8) / comb(128, 8)


# Milliseconds by hand, for docs/several_processes.md: rows x 4096 bytes x 4 ways / bytes a second, latencies, and
# 65,536 rows of 28.3 MFLOP in 400 TFLOP/s.
COMPUTE = 65536 * 18 * 2048 * 768 / 400e12
NVLINK, NDR = 8192 * 4096 * 4 / 360e9, 8192 * 4096 * 4 / 40e9
BY_HAND = {
    "--ranks 8 --experts-per-rank 16": COMPUTE + 7 * NVLINK + 80e-6,
    f"{FOUR_NODES} --exchange choice": COMPUTE + 6 * NDR + 160e-6,
    f"{FOUR_NODES} --exchange token": COMPUTE + 24 * of_groups(4) * NDR + 160e-6,
    f"{FOUR_NODES} --exchange node": COMPUTE + 3 * of_groups(32) * NDR + 28 * of_groups(4) * NVLINK + 240e-6,
    f"{FOUR_NODES} --exchange node --cards-per-node 1": COMPUTE
    + 24 * of_groups(32) * NDR
    + 28 * of_groups(4) * NVLINK
    + 240e-6,
}


@pytest.mark.parametrize("where", list(BY_HAND))
def test_prediction_is_near_a_calculation_by_hand(where, capsys):
    main(f"{where} {QWEN3}".split())
    predicted = float(capsys.readouterr().out.splitlines()[1].split()[1])
    assert 0.8 < predicted / (BY_HAND[where] * 1e3) < 1.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 8 --top-k 99", "--top-k 99 is more than the 32 experts"),
        ("--loads {loads} --ranks 2 --top-k 5", "--top-k 5 is more than the 4 experts"),
        ("--skew nan", "argument --skew: nan is not a number of at least 0"),
        ("--latency -1", "argument --latency: -1 is not a number of at least 0"),
        ("--node-latency inf", "argument --node-latency: inf is not a number of at least 0"),
        ("--loads {loads} --ranks 2 --skew 2", "--skew has no effect: --loads gives the loads"),
        ("--loads {loads} --ranks 2 --tokens 9", "--tokens has no effect: --loads gives the loads"),
        ("--layer gate", "--layer has no effect: without --loads"),
        ("--node-latency 5", "--node-latency has no effect: without --ranks-per-node"),
        ("--node-network ib-hdr", "--node-network has no effect: without --ranks-per-node"),
        ("--cards-per-node 2", "--cards-per-node has no effect: without --ranks-per-node"),
    ],
)
def test_option_that_no_time_follows_from_is_refused_by_name(arguments, message, tmp_path, capsys):
    loads = tmp_path / "loads.json"
    loads.write_text("[[1, 2, 3, 4]]")
    with pytest.raises(SystemExit) as end:
        main(arguments.format(loads=loads).split())
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_half_a_node_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--ranks", "12", "--ranks-per-node", "8"])
    assert "12 ranks are not whole nodes of 8" in capsys.readouterr().err


def test_recorded_loads(tmp_path, capsys):
    path = tmp_path / "loads.json"
    path.write_text(json.dumps([[5, 3, 1, 1]] * 2))
    main(["--loads", str(path), "--ranks", "2", "--network", "nvlink"])
    expected = step_time(
        [5, 3, 1, 1], 2, Layer(2048, 4096, bytes_per_element=2), Hardware(0.8 * 450e9, 400e12)
    ).total
    assert f"{expected * 1e3:10.3f}" in capsys.readouterr().out.splitlines()[1]
    with pytest.raises(SystemExit):
        main(["--loads", str(path), "--ranks", "3"])


def test_recorded_telemetry(tmp_path, capsys):
    """Lines that balance.write appends, one for each collect()."""
    path = tmp_path / "load.jsonl"
    gates = [torch.nn.Sequential(NaiveGate(4, 4, 1)), torch.nn.Sequential(NaiveGate(4, 4, 1))]
    monitor = balance.watch(torch.nn.ModuleDict({"first": gates[0], "second": gates[1]}))
    loads = [[5, 3, 1, 1], [1, 1, 1, 7]]
    for step, load in enumerate(loads):
        for counters in monitor.counters.values():
            counters.tokens_per_expert += torch.tensor(load)
            load = load[::-1]
        balance.write(monitor.collect(step), path)
    first, second = monitor.counters
    assert read_loads(path) == read_loads(path, first) == loads
    assert read_loads(path, second) == [load[::-1] for load in loads]
    main(["--loads", str(path), "--layer", second, "--ranks", "2", "--network", "nvlink"])
    assert "2 ranks, nvlink" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--loads", str(path), "--layer", "third"])
    assert "has no layer 'third' in every step, but first.0, second.0" in capsys.readouterr().err


def test_loads_without_a_row_have_no_speed_up(tmp_path, capsys):
    (tmp_path / "loads.json").write_text("[[0, 0, 0, 0]]")
    main(["--loads", str(tmp_path / "loads.json"), "--ranks", "2", "--network", "ib-ndr"])
    times = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert times == [["0.000", "1.00x"]] * 6


@pytest.mark.parametrize("exchange", ["token", "node"])
def test_shadows_leave_tokens_that_have_one_other_choice(exchange):
    """The choices left were taken for all choices of fewer tokens: 10 tokens a rank instead of 18."""
    layer = Layer(64, 128, top_k=2, exchange=exchange)
    hardware = Hardware(bandwidth=1e9, throughput=1e12)
    if exchange == "node":
        hardware = replace(hardware, ranks_per_node=1, node_bandwidth=1e9)
    # of 50 tokens with two choices each, 50 * (1 - 0.8^2) have one among the 20 of a rank; half of them go there
    time = step_time([60, 20, 10, 10], 2, layer, hardware, shadows=(0,))
    assert time.exchange == pytest.approx(4 * 0.5 * 18 * layer.row_bytes / 1e9)
    everywhere = step_time([50, 50, 0, 0], 2, layer, hardware, shadows=(0, 1))
    assert everywhere.exchange == 0
