"""A step of Muon beside torch.optim.Muon, and its iterations beside PyTorch's in bfloat16 and float32.

Muon makes the gradient of each matrix orthogonal by five Newton-Schulz iterations, which are most of its step.

python -m benchmarks.bench_newton_schulz [--threads 1] [--rounds 7] [--json results/newton_schulz.json]
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks import common
from fmoe_ext import ops
from fmoe_ext.optim import Muon

COEFFICIENTS, STEPS = (3.4445, -4.7750, 2.0315), 5
SHAPES = [(8, 336, 256), (8, 256, 336), (1, 1024, 256), (64, 128, 256), (8, 1024, 512)]


def muon_steps(shape):
    """One step of either optimizer, for a stack and for a parameter a matrix."""
    stack = nn.Parameter(torch.randn(shape))
    stack.grad = torch.randn(shape)
    single = [nn.Parameter(x.clone()) for x in stack.detach()]
    for p, grad in zip(single, stack.grad, strict=True):
        p.grad = grad.clone()
    return {"Muon": Muon([stack]).step, "torch.optim.Muon": torch.optim.Muon(single).step}


def iteration_steps(shape):
    low, high = sorted(shape[1:])
    x = torch.randn(shape[0], low, high)
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    rounded = x.bfloat16()
    return {
        "operator": lambda: torch.ops.fmoe_ext.newton_schulz(rounded, *COEFFICIENTS, STEPS),
        "torch, bfloat16": lambda: ops.newton_schulz_ref(rounded, COEFFICIENTS, STEPS),
        "torch, float32": lambda: ops.newton_schulz_ref(x, COEFFICIENTS, STEPS),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results here, and as a table beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results, rows = [], []
    for shape in SHAPES:
        steps = {**muon_steps(shape), **iteration_steps(shape)}
        found = {name: common.summary(s) for name, s in common.interleave(steps, args.rounds).items()}
        results.append({"shape": shape, **found})
        rows.append((shape, *(f"{1e3 * s['median']:.1f}" for s in found.values())))
    text = common.table(["matrices", *(f"{name}, ms" for name in steps)], rows)
    print(text)
    if args.json:
        command = "python -m benchmarks.bench_newton_schulz " + " ".join(sys.argv[1:])
        common.write(args.json, command, results, text)


if __name__ == "__main__":
    main()
