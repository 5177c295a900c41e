"""The command `fmoe gpu prove`: prove a GPU's kernels, print the report, save it for FMOE_GPU_KERNELS=auto."""

import argparse
import sys
from collections.abc import Sequence

from fmoe_ext._cli import positive_float
from fmoe_ext.gpu.proof import report
from fmoe_ext.gpu.prove import prove
from fmoe_ext.gpu.target import Target, Unavailable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command -> exit status: 0 none failed, 1 a kernel failed, 2 the GPU or the file cannot be used."""
    parser = argparse.ArgumentParser(prog="fmoe gpu")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "prove",
        help="check and time every kernel on a GPU, and keep what was found for FMOE_GPU_KERNELS=auto",
    )
    command.add_argument("--device", type=int, default=0, help="number of the CUDA device (default: 0)")
    command.add_argument(
        "--limit", type=positive_float, default=60.0, help="seconds for one kernel (default: 60)"
    )
    command.add_argument("--budget", type=positive_float, default=300.0, help="seconds in all (default: 300)")
    command.add_argument(
        "--missing",
        action="store_true",
        help="take over which kernels are right on GPUs of this compute capability, and race them here",
    )
    given = parser.parse_args(arguments)
    return run(Target(given.device), given.limit, given.budget, given.missing)


def run(target: Target, limit: float, budget: float, missing: bool = False) -> int:
    """Prove a target, print and save what was found -> exit status, as main()."""
    try:
        proof = prove(target, limit, budget, lambda text: print(text, flush=True), missing=missing)
    except Unavailable as error:
        print(f"nothing was proved: {error}", file=sys.stderr)
        return 2
    print(f"\n{report(proof)}")
    try:
        print(f"kept in {proof.save()}")
    except OSError as error:
        print(
            f"the proof could not be kept ({error}): set XDG_CACHE_HOME to a folder that can be written",
            file=sys.stderr,
        )
        return 2
    return 1 if proof.in_state("failed") else 0
