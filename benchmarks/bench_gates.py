"""What gates, balance losses and load telemetry cost, beside a layer's training step, all in one process.

python -m benchmarks.bench_gates [--threads 2] [--rounds 9] [--tokens 16384] [--json results.json]
"""

import argparse
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
    logits = torch.randn(num_tokens, E, requires_grad=True)
    grad = torch.randn(num_tokens, K)

    def ours():
        torch.autograd.grad(ops.topk_gate(logits, K)[1], logits, grad)

    def plain():
        torch.autograd.grad(logits.topk(K).values.softmax(-1), logits, grad)

    return ours, plain


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, D, requires_grad=True)
    linear = nn.Linear(D, E)
    steps = {f"gate {name}": gate_step(name, x) for name in GATES}
    steps["nn.Linear(D, E) alone"] = lambda: linear(x).sum().backward()
    steps["topk_gate"], steps["topk + softmax"] = topk_steps(args.tokens)
    steps["balance loss"], steps["softmax alone"] = loss_steps(args.tokens)
    steps["telemetry"] = count_step(args.tokens)
    steps["layer step"] = layer_step(x)
    seconds = {name: min(s) for name, s in common.interleave(steps, args.rounds).items()}
    layer = seconds["layer step"]
    rows = [(name, f"{1e3 * s:.2f}", f"{100 * s / layer:.2f} %") for name, s in seconds.items()]
    text = common.table(["forward + backward", "ms, least", "of the layer step"], rows)
    speedup = seconds["topk + softmax"] / seconds["topk_gate"]
    share = seconds["telemetry"] / layer
    text += f"\n\ntopk_gate is {speedup:.1f} times as fast as topk + softmax (bar: 2)."
    text += f"\nTelemetry is {100 * share:.2f} % of the layer's step (bar: 1 %)."
    print(f"T={args.tokens} E={E} K={K} D={D} H={H}, float32\n{text}")
    if args.json:
        command = f"python -m benchmarks.bench_gates --tokens {args.tokens} --rounds {args.rounds}"
        results = [{"name": name, "seconds": s} for name, s in seconds.items()]
        common.write(args.json, command, results, text)


if __name__ == "__main__":
    main()
