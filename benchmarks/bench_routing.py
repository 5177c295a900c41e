"""The routing operators against plain PyTorch, in turn in one process: times, ratios, and the bar for each.

python -m benchmarks.bench_routing [--threads 2] [--rounds 15] [--only sort_tokens] [--json results/routing.json]
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import common
from fmoe_ext import ops


def random_choices(T, E, K):
    return torch.rand(T, E).topk(K).indices


def bench_sort_tokens(T, E, K):
    topk_idx = random_choices(T, E, K)
    small = topk_idx.to(torch.uint8)

    def argsort(idx):
        return torch.argsort(idx.flatten(), stable=True), torch.bincount(idx.flatten(), minlength=E)

    def ours():
        return ops.sort_tokens(topk_idx, E)

    yield "argsort + bincount int64", 5.0, ours, lambda: argsort(topk_idx)
    if E <= 256:
        yield "argsort uint8", 1.0, ours, lambda: torch.argsort(small.flatten(), stable=True)


def bench_apply_capacity(T, E, K):
    topk_idx = random_choices(T, E, K)
    capacity = T * K // E
    yield (
        "cumsum of one-hot",
        1.0,
        lambda: ops.apply_capacity(topk_idx, E, capacity),
        lambda: ops.apply_capacity_ref(topk_idx, E, capacity),
    )


def bench_permute(T, E, K, D, dtype):
    sort = ops.sort_tokens(random_choices(T, E, K), E)
    x = torch.randn(T, D).to(dtype)
    rows = torch.randn(T * K, D).to(dtype)
    index = sort.row_idx.long() // K
    ours = lambda: ops.permute(x, sort.row_idx, sort.inverse)  # noqa: E731
    yield "clone of the result", 0.9, ours, rows.clone
    yield "index_select", 1.0, ours, lambda: x.index_select(0, index)


def bench_unpermute(T, E, K, D, dtype):
    sort = ops.sort_tokens(random_choices(T, E, K), E)
    y = torch.randn(T * K, D).to(dtype).requires_grad_()
    weights = torch.rand(T, K).to(dtype).requires_grad_()
    grad = torch.randn(T, D).to(dtype)
    inverse = sort.inverse.long()

    def ours():
        return ops.unpermute(y, sort.row_idx, sort.inverse, weights)

    def plain():
        return torch.nn.functional.embedding_bag(inverse, y, per_sample_weights=weights, mode="sum")

    def forward(function):
        def run():
            with torch.no_grad():
                return function()

        return run

    def backward(function):
        result = function()
        return lambda: torch.autograd.grad(result, (y, weights), grad, retain_graph=True)

    yield "embedding_bag, forward", 1.0, forward(ours), forward(plain)
    yield "embedding_bag, backward", 2.0, backward(ours), backward(plain)


def bench_topk_gate(T, E, K, dtype):
    logits = torch.randn(T, E).to(dtype).requires_grad_()
    grad = torch.randn(T, K).to(dtype)

    def plain():
        values, topk_idx = logits.topk(K)
        return topk_idx, values.softmax(-1)

    def ours():
        return ops.topk_gate(logits, K)

    def backward(function):
        result = function()[1]
        return lambda: torch.autograd.grad(result, logits, grad, retain_graph=True)

    yield "topk + softmax, forward", 2.0, ours, plain
    yield "topk + softmax, backward", 2.0, backward(ours), backward(plain)


FLOAT, BFLOAT = torch.float32, torch.bfloat16
CASES = [
    ("sort_tokens", bench_sort_tokens, {"T": 65536, "E": 256, "K": 8}),
    ("sort_tokens", bench_sort_tokens, {"T": 16384, "E": 64, "K": 8}),
    ("apply_capacity", bench_apply_capacity, {"T": 16384, "E": 64, "K": 8}),
    ("permute", bench_permute, {"T": 16384, "E": 64, "K": 8, "D": 512, "dtype": FLOAT}),
    ("permute", bench_permute, {"T": 16384, "E": 64, "K": 8, "D": 512, "dtype": BFLOAT}),
    ("unpermute", bench_unpermute, {"T": 16384, "E": 64, "K": 8, "D": 512, "dtype": FLOAT}),
    ("unpermute", bench_unpermute, {"T": 16384, "E": 64, "K": 8, "D": 512, "dtype": BFLOAT}),
    ("topk_gate", bench_topk_gate, {"T": 16384, "E": 64, "K": 8, "dtype": FLOAT}),
    ("topk_gate", bench_topk_gate, {"T": 65536, "E": 256, "K": 8, "dtype": FLOAT}),
    ("topk_gate", bench_topk_gate, {"T": 65536, "E": 256, "K": 8, "dtype": BFLOAT}),
]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="run the cases of this op only")
    parser.add_argument("--json", type=Path, help="write the results here, and as a table beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    results, rows = [], []
    for name, bench, sizes in CASES:
        if args.only and args.only != name:
            continue
        shape = " ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in sizes.items())
        for peer, bar, ours, plain in bench(**sizes):
            seconds = common.interleave({"ours": ours, "peer": plain}, args.rounds)
            mine, other = common.summary(seconds["ours"]), common.summary(seconds["peer"])
            ratio, of_min = other["median"] / mine["median"], other["min"] / mine["min"]
            results.append(
                {"op": name, "shape": shape, "against": peer, "bar": bar, "ours": mine, "peer": other}
            )
            times = [f"{1e3 * s['median']:.2f}" for s in (mine, other)]
            rows.append([name, shape, peer, *times, f"{ratio:.2f}", f"{of_min:.2f}", f"{bar:.1f}"])
    header = ["op", "shape", "against", "ours, ms", "peer, ms", "x faster", "of minimums", "bar"]
    text = common.table(header, rows)
    print(text)
    if args.json:
        common.write(args.json, "python -m benchmarks.bench_routing " + " ".join(sys.argv[1:]), results, text)


if __name__ == "__main__":
    main()
