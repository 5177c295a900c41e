"""`fmoe simulate`, and `python -m fmoe_ext.planning.simulate`: expected times of a step under each policy.

simulate() replays loads, recorded or drawn, through the policies of this package, on machines that are not here. Of
each step it asks the cost model (ep/cost.py) for the time under every one: nothing, overlap of exchange and experts,
shadows of busy experts, both, experts placed anew, and all of them. As in training, a policy knows only loads that came
before: shadows are chosen by the load of the last step, a placement by those since the last placement, and moving its
experts costs the time of the busiest rank. A policy that pays on skewed loads that stay may lose on loads that drift.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch

from fmoe_ext._cli import add_json, as_json, not_negative_float, positive_int, reason, run
from fmoe_ext.ep.cost import Hardware, Layer, step_time
from fmoe_ext.ep.shadowing import choose_shadows
from fmoe_ext.planning.placement import plan

# Bytes a second of one rank in one direction, as the makers state them, times 0.8 for what is reached in practice.
_NETWORKS = MappingProxyType(
    {
        "nvlink": 0.8 * 450e9,
        "ib-ndr": 0.8 * 50e9,
        "ib-hdr": 0.8 * 25e9,
        "ethernet-100g": 0.8 * 12.5e9,
        "ethernet-25g": 0.8 * 3.125e9,
    }
)
# FLOP a second that expert GEMMs reach: about half of the peak in bfloat16 (V100: float32).
_DEVICES = MappingProxyType({"h100": 400e12, "a100": 150e12, "v100": 11.5e12})

DESCRIPTION = """Expected step times of an expert-parallel layer on machines that are not here.

    fmoe simulate --ranks 8 64 1024 --network ib-ndr
    fmoe simulate --loads out/load.jsonl --ranks 16

Replays loads (what balance.write recorded, or a JSON list of steps, each a list of rows for each expert; without a
file: drawn, skewed and drifting) through the policies of this package and prints the expected time of a layer's forward
and backward under each.
Policies see loads of earlier steps alone, as in training. Model: ep/cost.py. With --ranks-per-node a rank has --network
to the others of its node and to other nodes its share of the node's cards, each a --node-network.
"""


Loads: TypeAlias = list[list[int]]  # steps, each with the rows of every expert

_POLICIES = ("none", "overlap", "shadowing", "overlap + shadowing", "placement", "all")


def draw_loads(num_steps: int, num_experts: int, num_rows: int, skew: float, seed: int = 0) -> Loads:
    """Draw loads: popularity falls as rank^-skew; at each step num_experts // 10 pairs of experts, or 1, swap ranks."""
    generator = torch.Generator("cpu").manual_seed(seed)
    weights = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu") ** -skew
    order = torch.randperm(num_experts, generator=generator, device="cpu")
    loads = []
    num_pairs = min(max(1, num_experts // 10), num_experts // 2)
    for _ in range(num_steps):
        # each expert in one pair at most, or two experts would get one rank, and no expert another
        paired = torch.randperm(num_experts, generator=generator, device="cpu")
        a, b = paired[:num_pairs], paired[num_pairs : 2 * num_pairs]
        order[a], order[b] = order[b].clone(), order[a].clone()
        drawn = torch.poisson(weights * (num_rows / weights.sum()), generator=generator)
        loads.append(drawn[order].long().tolist())
    return loads


def read_loads(path: Path, layer: str | None = None) -> Loads:
    """Read recorded loads: steps, each with the rows of every expert.

    path: JSON lines {"layers": {gate: {"tokens_per_expert": [E]}}}, as balance.write appends them, of which one gate's
    are taken; or one JSON list of lists. Raises ValueError if there is no such gate or the number of experts changes.
    """
    text = path.read_text()
    try:
        if text.lstrip().startswith("{"):  # JSON lines of balance.write
            records = [json.loads(line)["layers"] for line in text.splitlines() if line.strip()]
            layer = layer or next(iter(records[0]))
            if any(layer not in record for record in records):
                raise ValueError(f"{path} has no layer {layer!r} in every step, but {', '.join(records[0])}")
            loads = [list(record[layer]["tokens_per_expert"]) for record in records]
        else:
            loads = [list(load) for load in json.loads(text)]
    except (KeyError, TypeError, AttributeError, StopIteration, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has no recorded loads ({type(error).__name__}: {error})") from None
    numbers = all(isinstance(rows, int) and rows >= 0 for load in loads for rows in load)
    if not numbers or not loads or not loads[0] or any(len(load) != len(loads[0]) for load in loads):
        raise ValueError(f"{path} must be steps with one number for each expert")
    return loads


def simulate(
    loads: Loads, num_ranks: int, layer: Layer, hardware: Hardware, num_chunks: int, every: int
) -> dict[str, float]:
    """Compute {policy: mean seconds of a step}; every `every` steps a new placement is planned and experts move."""
    num_experts = len(loads[0])
    num_local = num_experts // num_ranks
    num_chunks = min(num_chunks, num_local)  # a chunk is some experts of a rank, as in the layer
    in_place = list(range(num_experts))  # experts in the order of their places
    window = [0] * num_experts  # the load of each expert since the last placement
    sums = dict.fromkeys(_POLICIES, 0.0)
    last: Sequence[int] | None = None  # the load of the step before
    for step, load in enumerate(loads):
        # 1. What policies decide before the step, by earlier loads: a new placement, shadows under each placement.
        moving = 0.0
        if last is not None and step % every == 0:
            order = plan(window, num_ranks, in_place)
            parts = [slice(r * num_local, (r + 1) * num_local) for r in range(num_ranks)]
            arriving = [sum(e not in in_place[part] for e in order[part]) for part in parts]
            # all wait for the rank that gets most; parameters move with two moments of Adam in float32
            moved_bytes = max(arriving) * layer.expert_bytes * (1 + 8 / layer.bytes_per_element)
            moving = moved_bytes / hardware.bandwidth
            in_place, window = order, [0] * num_experts
        placed_load = [load[e] for e in in_place]
        shadows: tuple[int, ...] = ()
        placed_shadows: tuple[int, ...] = ()
        if last is not None:
            shadows = choose_shadows(last, num_ranks, layer, hardware)
            placed_shadows = choose_shadows([last[e] for e in in_place], num_ranks, layer, hardware)
        # 2. The step, by its own load.
        plain = step_time(load, num_ranks, layer, hardware)
        shadowed = step_time(load, num_ranks, layer, hardware, shadows)
        placed = step_time(placed_load, num_ranks, layer, hardware)
        everything = step_time(placed_load, num_ranks, layer, hardware, placed_shadows)
        sums["none"] += plain.total
        sums["overlap"] += plain.overlapped(num_chunks)
        sums["shadowing"] += shadowed.total
        sums["overlap + shadowing"] += shadowed.overlapped(num_chunks)
        sums["placement"] += placed.total + moving
        sums["all"] += everything.overlapped(num_chunks) + moving
        last = load
        window = [a + b for a, b in zip(window, load, strict=True)]
    return {policy: total / len(loads) for policy, total in sums.items()}


def show(title: str, times: dict[str, float]) -> None:
    """Print the milliseconds of each policy, and its speed-up over "none"."""
    print(f"{title}: ms a layer and step (speed-up)")
    for policy, seconds in times.items():
        speed_up = times["none"] / seconds if seconds else 1.0  # loads without a row take no time
        print(f"  {policy:20} {seconds * 1e3:10.3f}  {speed_up:5.2f}x")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fmoe simulate`."""
    add = parser.add_argument
    add("--loads", type=Path, help="recorded loads: JSON lines of fmoe_ext.balance.write, or a JSON list")
    add(
        "--layer",
        help="the gate whose loads to replay, where --loads has several; the first one if not given",
    )
    add("--ranks", type=positive_int, nargs="+", default=[8, 64, 256, 1024])
    add("--experts-per-rank", type=positive_int, default=4)
    add("--tokens", type=positive_int, default=8192, help="of each rank")
    add("--d-model", type=positive_int, default=2048)
    add("--d-hidden", type=positive_int, default=4096)
    add("--gated", action="store_true", help="experts with a gate, of three matrices (SwiGLU)")
    add("--top-k", type=positive_int, default=2)
    add("--exchange", choices=("choice", "token", "node"), default="choice")
    add("--network", choices=sorted(_NETWORKS), nargs="+", default=list(_NETWORKS))
    add("--ranks-per-node", type=positive_int, help="all ranks are on one node if not given")
    add("--node-network", choices=sorted(_NETWORKS), default="ib-ndr", help="of a network card")
    add("--cards-per-node", type=positive_int, help="one for each rank if not given")
    add("--latency", type=not_negative_float, default=0.0, help="microseconds of an exchange inside a node")
    add(
        "--node-latency",
        type=not_negative_float,
        default=0.0,
        help="microseconds of an exchange between nodes",
    )
    add("--device", choices=sorted(_DEVICES), default="h100")
    add("--skew", type=not_negative_float, default=0.6, help="of drawn loads; 0 is even")
    add("--steps", type=positive_int, default=40)
    add("--chunks", type=positive_int, default=4, help="overlap_degree; at most the experts of a rank")
    add("--every", type=positive_int, default=20, help="steps between placements")
    add_json(parser)


def print_times(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Print the times of each policy that the options ask for, or an error of the parser."""
    # an option whose value nothing would read is an error
    unread = {
        "--loads gives the loads": (
            options.loads is not None,
            ("experts_per_rank", "tokens", "skew", "steps"),
        ),
        "without --loads": (options.loads is None, ("layer",)),
        "without --ranks-per-node": (
            options.ranks_per_node is None,
            ("node_network", "node_latency", "cards_per_node"),
        ),
    }
    for why, (applies, names) in unread.items():
        for name in names:
            if applies and getattr(options, name) != parser.get_default(name):
                parser.error(f"--{name.replace('_', '-')} has no effect: {why}")
    loads = None
    if options.loads is not None:
        try:
            loads = read_loads(options.loads, options.layer)
        except (OSError, ValueError) as error:
            parser.error(f"--loads: {reason(error)}")
    # every number of ranks on every network
    found: list[dict[str, object]] = []
    num_matrices = 3 if options.gated else 2
    layer = Layer(options.d_model, options.d_hidden, num_matrices, 2, options.top_k, options.exchange)
    for num_ranks in options.ranks:
        num_experts = len(loads[0]) if loads else num_ranks * options.experts_per_rank
        if (
            options.ranks_per_node
            and num_ranks > options.ranks_per_node
            and num_ranks % options.ranks_per_node
        ):
            parser.error(f"{num_ranks} ranks are not whole nodes of {options.ranks_per_node}")
        if num_experts % num_ranks:
            parser.error(f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks")
        if options.top_k > num_experts:
            parser.error(f"--top-k {options.top_k} is more than the {num_experts} experts")
        rows = num_ranks * options.tokens * options.top_k
        drawn = loads or draw_loads(options.steps, num_experts, rows, options.skew)
        for network in options.network:
            size = options.ranks_per_node
            # network cards that a rank has
            share = 1.0 if size is None else (options.cards_per_node or size) / size
            hardware = Hardware(
                _NETWORKS[network],
                _DEVICES[options.device],
                latency=options.latency * 1e-6,
                ranks_per_node=size,
                node_bandwidth=share * _NETWORKS[options.node_network],  # ranks of a node share its cards
                node_latency=options.node_latency * 1e-6,
            )
            times = simulate(drawn, num_ranks, layer, hardware, options.chunks, options.every)
            found.append({"ranks": num_ranks, "network": network, "seconds": times})
            if not options.json:
                show(f"{num_ranks} ranks, {network}", times)
    if options.json:
        print(as_json(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the expected times of each policy that the command line asks for."""
    parser = argparse.ArgumentParser(
        "fmoe simulate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    print_times(parser, parser.parse_args(arguments))


if __name__ == "__main__":
    run(main)
