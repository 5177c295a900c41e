"""`fmoe pipeline plan`: the fastest parallel layouts of a model that fit the memory."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from fmoe_ext._cli import add_json, as_json, positive_float, positive_int, reason
from fmoe_ext.ep.cost import Hardware
from fmoe_ext.pipeline.plan import GIB, Estimate, advice, plan
from fmoe_ext.pipeline.sizes import sizes_of

HEADERS = (
    f"{'':34} | GiB a rank                                | seconds a step",
    "  pp  dp  ep schedule       chunks |       all:    params      kept exchanged | "
    "      all:   compute   bubbles   network",
)


def _build_parser() -> argparse.ArgumentParser:
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
    add("--top", type=positive_int, default=10, help="so many layouts are shown")
    add_json(command)
    return parser


def _line(found: Estimate) -> str:
    layout = found.layout
    memory = [x / GIB for x in (found.memory, found.parameters, found.activations, found.buffers)]
    seconds = found.seconds, found.compute, found.bubbles, found.network
    return (
        f"{layout.pp:4d}{layout.dp:4d}{layout.ep:4d} {layout.schedule:14} {layout.chunks:6d} | "
        f"{memory[0]:9.3f}: {memory[1]:9.3f} {memory[2]:9.3f} {memory[3]:9.3f} | "
        f"{seconds[0]:9.4f}: {seconds[1]:9.4f} {seconds[2]:9.4f} {seconds[3]:9.4f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of the command line."""
    options = _build_parser().parse_args(arguments)
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
    if options.json:
        best = [{**asdict(e), "memory": e.memory, "seconds": e.seconds} for e in found[: options.top]]
        print(as_json({"layouts": best, "advice": advice(found, hardware)}))
        return
    print("\n".join([*HEADERS, *map(_line, found[: options.top]), "", advice(found, hardware)]))
