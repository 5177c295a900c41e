"""Run `fmoe pipeline plan`: memory and time of every layout of a model, on ranks that are not here.

`fmoe pipeline simulate` is here too: it is `fmoe simulate` (simulate.py) under another name.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from fmoe_ext._cli import add_json, as_json, positive_float, positive_int, reason
from fmoe_ext.ep.cost import Hardware
from fmoe_ext.planning import simulate
from fmoe_ext.planning.layouts import GIB, advice, plan
from fmoe_ext.planning.sizes import sizes_of


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan, or the times of the policies, that the command line asks for."""
    # 1. The options of `fmoe pipeline plan` and `fmoe pipeline simulate`.
    parser = argparse.ArgumentParser(prog="fmoe pipeline")
    commands = parser.add_subparsers(dest="command", required=True)
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
    command = commands.add_parser(
        "simulate",
        prog="fmoe simulate",
        help="expected times of an expert-parallel layer under each policy (also fmoe simulate)",
        description=simulate.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_options(command)
    options, unknown = parser.parse_known_args(arguments)
    command = commands.choices[options.command]
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command == "simulate":
        simulate.print_times(command, options)
        return
    # 2. The plan.
    hardware = Hardware(options.gbytes_per_second * 1e9, options.tflops * 1e12, options.memory_gib * GIB)
    try:
        sizes, missing = sizes_of(options.model)
        if missing:
            print(f"not in the estimate: {', '.join(missing)}", file=sys.stderr)
        # with checkpointing a layer keeps its input alone
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
    # 3. As JSON, or as a table.
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
