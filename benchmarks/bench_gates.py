"""Cost of gates, balance losses and load telemetry beside a layer's training step, all in turn in one process.

python -m benchmarks.bench_gates [--threads 2] [--rounds 9] [--tokens 16384] [--json results/gates.json]
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from benchmarks import common
from fmoe_ext import FMoETransformerMLP, balance, ops
from fmoe_ext.gates import GATES, SoftmaxGate, balance_loss

E, K, D, H = 64, 8, 512, 512
TWO_CHOICES = ("gshard", "dc", "faster")


def gate_step(name, x):
    """Forward and backward of a gate with its loss."""
    torch.manual_seed(0)
    gate = GATES[name](D, E, 1, 2 if name in TWO_CHOICES else K)

    def step():
        _, topk_weights = gate(x)
        loss = gate.get_loss()
        total = topk_weights.sum() + (0 if loss is None else loss.sum())
        if total.requires_grad:
            total.backward()

    return step


def layer_step(x):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate=SoftmaxGate, bias=False)

    def step():
        (layer(x).square().mean() + 0.01 * layer.gate.get_loss()).backward()

    return step


def count_step(num_tokens):
    """One step of the telemetry of one layer."""
    counters = balance.LayerCounters(E, "cpu")
    topk_idx, topk_weights = ops.topk_gate(torch.randn(num_tokens, E), K)
    return lambda: counters.count(topk_idx, topk_weights)


def topk_steps(num_tokens):
    """topk_gate and topk + softmax: forward, backward, and one after the other."""
    logits = torch.randn(num_tokens, E, requires_grad=True)
    grad = torch.randn(num_tokens, K)
    functions = {
        "topk_gate": lambda: ops.topk_gate(logits, K)[1],
        "topk + softmax": lambda: logits.topk(K).values.softmax(-1),
    }
    steps = {}
    for name, function in functions.items():
        weights = function()
        steps[f"{name}, forward"] = function
        steps[f"{name}, backward"] = lambda weights=weights: torch.autograd.grad(
            weights, logits, grad, retain_graph=True
        )
        steps[f"{name}, both"] = lambda function=function: torch.autograd.grad(function(), logits, grad)
    return steps


def loss_steps(num_tokens):
    """The balance loss with its softmax, and the softmax alone, forward and backward."""
    logits = torch.randn(num_tokens, E, requires_grad=True)
    topk_idx, _ = ops.topk_gate(logits, K)
    grad = torch.randn(num_tokens, E)

    def loss():
        torch.autograd.grad(balance_loss(logits.softmax(-1), topk_idx), logits)

    def softmax():
        torch.autograd.grad(logits.softmax(-1), logits, grad)

    return loss, softmax


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path, help="write the results here, and as a table beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, D, requires_grad=True)
    linear = nn.Linear(D, E)
    steps = {f"gate {name}": gate_step(name, x) for name in GATES}
    steps["nn.Linear(D, E) alone"] = lambda: linear(x).sum().backward()
    steps |= topk_steps(args.tokens)
    steps["balance loss"], steps["softmax alone"] = loss_steps(args.tokens)
    steps["telemetry"] = count_step(args.tokens)
    steps["layer step"] = layer_step(x)
    seconds = {name: common.summary(s) for name, s in common.interleave(steps, args.rounds).items()}
    layer = seconds["layer step"]["min"]
    rows = [
        (name, f"{1e3 * s['median']:.2f}", f"{1e3 * s['min']:.2f}", f"{100 * s['min'] / layer:.2f} %")
        for name, s in seconds.items()
    ]
    text = common.table(["step", "median ms", "least ms", "of the layer step"], rows)
    text += "\n\nGates, loss and softmax: forward and backward. Shares and ratios are of the least times.\n"
    for part in ("forward", "backward", "both"):
        speedup = seconds[f"topk + softmax, {part}"]["min"] / seconds[f"topk_gate, {part}"]["min"]
        text += f"\ntopk_gate, {part}: {speedup:.1f} times as fast as topk + softmax (bar: 2)."
    text += f"\nTelemetry: {100 * seconds['telemetry']['min'] / layer:.3f} % of the layer's step (bar: 1 %)."
    print(f"T={args.tokens} E={E} K={K} D={D} H={H}, float32\n{text}")
    if args.json:
        command = "python -m benchmarks.bench_gates " + " ".join(sys.argv[1:])
        common.write(args.json, command, [{"name": name, **s} for name, s in seconds.items()], text)


if __name__ == "__main__":
    main()
