"""expert_mlp (SwiGLU) against plain PyTorch on the CPU: milliseconds and ratios of speed.

Every contestant runs once per round, in turn; a figure is the median over the rounds.
dense: matrix products of as many operations, without experts; loop: F.linear for one expert after another;
hand: argsort, index_select, grouped_mm, index_add.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from fmoe_ext.ops import expert_mlp

SHAPES = {  # T, d, n, E, K
    "A": (4096, 512, 2048, 8, 2),
    "B": (8192, 256, 512, 16, 2),
    "C": (2048, 1024, 512, 64, 8),
    "D": (64, 1024, 512, 64, 8),
    "E": (1, 1024, 512, 64, 8),
}


def sort_choices(topk_idx, num_experts):
    """row_idx, inverse and offs of choices of which none was dropped."""
    row_idx = topk_idx.flatten().argsort(stable=True)
    offs = torch.bincount(topk_idx.flatten(), minlength=num_experts).cumsum(0)
    return row_idx.int(), row_idx.argsort().view_as(topk_idx).int(), offs.int()


def ours(x, topk_idx, topk_weights, w1, w2):
    row_idx, inverse, offs = sort_choices(topk_idx, w1.shape[0])
    return expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, "swiglu")


def hand(x, topk_idx, topk_weights, w1, w2):
    order = topk_idx.flatten().argsort(stable=True)
    offs = torch.bincount(topk_idx.flatten(), minlength=w1.shape[0]).cumsum(0).int()
    token = order // topk_idx.shape[1]
    h = torch._grouped_mm(x.index_select(0, token), w1.transpose(1, 2), offs=offs)
    gate, up = h.chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)
    y = y * topk_weights.flatten()[order, None].to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def loop(x, topk_idx, topk_weights, w1, w2):
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, choice = torch.where(topk_idx == e)
        if token.numel() == 0:
            continue
        gate, up = F.linear(x[token], w1[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w2[e]) * topk_weights[token, choice, None].to(x.dtype)
        out = out.index_add(0, token, y)
    return out


def make_inputs(shape, dtype):
    T, d, n, E, K = shape
    x = torch.randn(T, d).to(dtype).requires_grad_()
    w1 = (torch.randn(E, 2 * n, d) * d**-0.5).to(dtype).requires_grad_()
    w2 = (torch.randn(E, d, n) * n**-0.5).to(dtype).requires_grad_()
    topk_weights, topk_idx = torch.randn(T, E).softmax(-1).topk(K)
    return x, topk_idx, topk_weights.requires_grad_(), w1, w2


def dense_call(shape, dtype):
    """The products of the expert MLP, forward or forward and backward, on operands of the same total size."""
    T, d, n, _, K = shape
    x, h, a, y = (torch.randn(T * K, size).to(dtype) for size in (d, 2 * n, n, d))
    w1, w2 = torch.randn(2 * n, d).to(dtype), torch.randn(d, n).to(dtype)

    def call(backward):
        torch.mm(x, w1.t()), torch.mm(a, w2.t())
        if backward:
            torch.mm(y, w2), torch.mm(y.t(), a), torch.mm(h, w1), torch.mm(h.t(), x)

    return call


def moe_call(function, inputs):
    parameters = [t for t in inputs if t.requires_grad]

    def call(backward):
        if backward:
            y = function(*inputs)
            torch.autograd.grad(y, parameters, torch.ones_like(y))
        else:
            with torch.no_grad():
                function(*inputs)

    return call


def measure(calls, backward, rounds):
    times = {name: [] for name in calls}
    for name in calls:
        calls[name](backward)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call(backward)
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="ABCDE")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contestants = {"ours": ours, "hand": hand, "loop": loop}
    print(f"torch {torch.__version__}, {args.threads} threads, milliseconds, median of {args.rounds} rounds")
    names = ["ours", "dense", "hand", "loop"]
    print("| shape | dtype | pass |", " | ".join(names), "| ours / dense speed | ours / best peer speed |")
    print("|---" * (5 + len(names)) + "|")
    for shape_name in args.shapes:
        for dtype_name in args.dtypes:
            shape, dtype = SHAPES[shape_name], getattr(torch, dtype_name)
            inputs = make_inputs(shape, dtype)
            calls = {name: moe_call(function, inputs) for name, function in contestants.items()}
            calls["dense"] = dense_call(shape, dtype)
            for backward in (False, True):
                ms = measure(calls, backward, args.rounds)
                print(
                    f"| {shape_name} | {dtype_name} | {'fwd+bwd' if backward else 'fwd'} |",
                    " | ".join(f"{ms[name]:.1f}" for name in names),
                    f"| {ms['dense'] / ms['ours']:.2f} | {min(ms['hand'], ms['loop']) / ms['ours']:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
