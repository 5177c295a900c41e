"""The planner's commands: `fmoe pipeline plan` ranks layouts of a model, `fmoe simulate` policies of a layer.

Both ask the cost model (ep/cost.py) what a step would take on ranks that are not here.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from fmoe_ext._cli import add_json, as_json, not_negative_float, positive_float, positive_int, reason
from fmoe_ext.ep.cost import Hardware, Layer
from fmoe_ext.planning.layouts import GIB, advice, plan
from fmoe_ext.planning.policies import draw_loads, read_loads, show, simulate
from fmoe_ext.planning.sizes import sizes_of

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

_SIMULATE = """Expected step times of an expert-parallel layer on machines that are not here.

    fmoe simulate --ranks 8 64 1024 --network ib-ndr
    fmoe simulate --loads out/load.jsonl --ranks 16

Replays loads (what balance.write recorded, or a JSON list of steps, each a list of rows for each expert; without a
file: drawn, skewed and drifting) through the policies of this package and prints the expected time of a layer's forward
and backward under each.
Policies see the load of the step before, as in training. Model: ep/cost.py. With --ranks-per-node a rank has --network
to the others of its node and to other nodes its share of the node's cards, each a --node-network.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan, or the times of the policies, that the command line asks for."""
    parser = argparse.ArgumentParser(prog="fmoe pipeline")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_plan(commands)
    _add_simulate(commands)
    options, unknown = parser.parse_known_args(arguments)
    command = commands.choices[options.command]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "plan":
        _plan(options)
    else:
        _simulate(command, options)


def _add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "plan",
        help="memory and time of every pp x dp x ep x schedule, the best first",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = command.add_argument
    add(
        "--model",
        required=True,
        help="config.json of Transformers, a folder or name of a model, a GGUF file, or "
        "d_model=...,num_layers=...,num_heads=...,d_hidden=...,vocabulary=...[,num_experts=...,top_k=...]",
    )
    add("--ranks", type=positive_int, required=True, help="processes, one a device")
    add("--batch", type=positive_int, default=256, help="sequences of a step, on all ranks together")
    add("--length", type=positive_int, default=2048, help="tokens of a sequence")
    add("--element-bytes", type=positive_int, default=4, help="of a parameter, a gradient, an activation")
    add("--checkpoint", action="store_true", help="layers compute their activations again in backward")
    add("--tflops", type=positive_float, default=200.0, help="that a rank reaches, 10^12 a second")
    add("--gbytes-per-second", type=positive_float, default=50.0, help="from a rank to others, 10^9")
    add("--memory-gib", type=positive_float, default=80.0, help="of a rank")
    add("--top", type=positive_int, default=10, help="number of layouts shown")
    add_json(command)


def _plan(options: argparse.Namespace) -> None:
    hardware = Hardware(options.gbytes_per_second * 1e9, options.tflops * 1e12, options.memory_gib * GIB)
    try:
        sizes, missing = sizes_of(options.model)
        if missing:
            print(f"not in the estimate: {', '.join(missing)}", file=sys.stderr)
        kept = options.length * sizes.d_model * options.element_bytes if options.checkpoint else 0
        layers = sizes.layers(options.length, options.element_bytes)
        found = plan(
            layers,
            options.ranks,
            options.batch,
            hardware,
            num_experts=sizes.num_experts,
            checkpoint_bytes=kept,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {reason(error)}")
    best = found[: options.top]
    if options.json:
        facts = [{**asdict(e), "memory": e.memory, "seconds": e.seconds} for e in best]
        print(as_json({"layouts": facts, "advice": advice(found, hardware)}))
        return
    print(f"{'':34} | GiB a rank                                | seconds a step")
    print(
        "  pp  dp  ep schedule       chunks |       all:    params      kept exchanged | "
        "      all:   compute   bubbles   network"
    )
    for e in best:
        layout, memory = e.layout, [x / GIB for x in (e.memory, e.parameters, e.activations, e.buffers)]
        print(
            f"{layout.pp:4d}{layout.dp:4d}{layout.ep:4d} {layout.schedule:14} {layout.chunks:6d} | "
            f"{memory[0]:9.3f}: {memory[1]:9.3f} {memory[2]:9.3f} {memory[3]:9.3f} | "
            f"{e.seconds:9.4f}: {e.compute:9.4f} {e.bubbles:9.4f} {e.network:9.4f}"
        )
    print(f"\n{advice(found, hardware)}")


def _add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "simulate",
        prog="fmoe simulate",
        help="expected times of an expert-parallel layer under each policy (also fmoe simulate)",
        description=_SIMULATE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = command.add_argument
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
    add("--chunks", type=positive_int, default=4, help="overlap_degree")
    add("--every", type=positive_int, default=20, help="steps between placements")
    add_json(command)


def _simulate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
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
