"""fmoe.megatron.utils: FastMoE's options for Megatron's parser."""

from __future__ import annotations

import argparse


def add_fmoe_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FastMoE's options to Megatron's parser; --num-experts becomes --fmoe-num-experts where it is taken."""
    group = parser.add_argument_group(title="fastmoe")
    group.add_argument("--fmoefy", action="store_true", help="replace the MLPs by MoE layers")
    try:
        group.add_argument("--num-experts", type=int, default=None, help="experts of each rank")
    except argparse.ArgumentError:
        group.add_argument("--fmoe-num-experts", type=int, default=None, help="experts of each rank")
    group.add_argument("--top-k", type=int, default=2, help="experts of each token")
    group.add_argument("--balance-loss-weight", type=float, default=1, help="factor of the balance loss")
    group.add_argument("--balance-strategy", type=str, default=None, help="gate: naive, noisy, gshard, ...")
    group.add_argument("--hidden-hidden-size", type=int, default=None, help="hidden width of an expert")
    return parser
