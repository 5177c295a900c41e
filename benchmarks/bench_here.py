"""This processor's row: ten shapes of experts against the fastest of three ways with torch alone, in three minutes.

    python -m benchmarks.bench_here                       the row of docs/measurements.md, after its cases
    python -m benchmarks.bench_here --threads 1 --seconds 600 --out benchmarks/results/here_name.json

A ratio is the peer's median time over ours, measured in turn in one process: below 1 we are slower. Dense is a chain of
torch.mm with the FLOPs of all experts, where each has 256 rows or more. To force AVX2 see bench_layer.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks import common, peers
from fmoe_ext import ops
from fmoe_ext.experts import ClampedSwiGLU, FusedExperts, GatedActivation
from fmoe_ext.routing import sort_choices

DEEPSEEK = GatedActivation(F.silu, 10.0)
CASES = (  # T, d, h, E, k, activation
    (1, 2048, 768, 128, 8, "swiglu"),
    (16, 1024, 512, 64, 8, "GPT-OSS"),
    (64, 1024, 512, 64, 8, "swiglu"),
    (128, 768, 1536, 16, 4, "gelu"),
    (512, 512, 1024, 8, 2, "gelu"),
    (1024, 256, 1024, 8, 1, "gelu"),
    (1024, 512, 256, 64, 8, "GPT-OSS"),
    (1024, 1024, 512, 32, 4, "DeepSeek-V4"),
    (4096, 256, 1024, 8, 2, "gelu"),
    (8192, 128, 256, 128, 4, "swiglu"),
)
KEY = ("shape", "activation", "dtype", "pass")
OURS = {"gelu": "gelu", "swiglu": "swiglu", "GPT-OSS": ClampedSwiGLU(), "DeepSeek-V4": DEEPSEEK}
THEIRS = {
    **{"gelu": F.gelu, "swiglu": GatedActivation(F.silu), "GPT-OSS": ClampedSwiGLU()},
    "DeepSeek-V4": DEEPSEEK,
}


def sorted_choices(topk_idx, num_experts):
    order = torch.argsort(topk_idx.flatten(), stable=True)
    counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
    return order, order // topk_idx.size(1), counts


def grouped_mm(act):
    def run(x, topk_idx, topk_weights, w1, w2):
        order, token, counts = sorted_choices(topk_idx, w1.size(0))
        offs = counts.cumsum(0).to(torch.int32)
        h = F.grouped_mm(x.index_select(0, token), w1.transpose(1, 2), offs=offs)
        y = F.grouped_mm(act(h), w2.transpose(1, 2), offs=offs)
        y = y * topk_weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, y)

    return run


def loop_with_index_add(act):
    def run(x, topk_idx, topk_weights, w1, w2):
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(w1.unbind(), w2.unbind(), strict=True)):
            token, k = torch.where(topk_idx == e)
            if token.numel():
                y = F.linear(act(F.linear(x.index_select(0, token), up)), down)
                out = out.index_add(0, token, y * topk_weights[token, k].unsqueeze(1))
        return out

    return run


def loop_over_split(act):
    def run(x, topk_idx, topk_weights, w1, w2):
        order, token, counts = sorted_choices(topk_idx, w1.size(0))
        rows = x.index_select(0, token).split(counts.tolist())
        parts = zip(rows, w1.unbind(), w2.unbind(), strict=True)
        y = torch.cat([F.linear(act(F.linear(part, up)), down) for part, up, down in parts if len(part)])
        y = y * topk_weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, y)

    return run


def ours(activation, E, d, h):
    with torch.device("meta"):
        experts = FusedExperts(E, d, h, OURS[activation], bias=False)

    def run(x, topk_idx, topk_weights, w1, w2):
        handle = sort_choices(topk_idx, E)
        return experts(x, handle.tokens_per_expert, handle, topk_weights, (w1, None, w2, None))

    return run


def inputs_of(case, dtype):
    T, d, h, E, k, activation = case
    generator = torch.Generator().manual_seed(0)

    def learnt(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).requires_grad_()

    topk_weights, topk_idx = torch.randn(T, E, generator=generator).topk(k, dim=1)
    topk_weights = topk_weights.softmax(1).to(dtype).requires_grad_()
    width = h if activation == "gelu" else 2 * h
    return (
        learnt(T, d),
        topk_idx,
        topk_weights,
        learnt(E, width, d, scale=d**-0.5),
        learnt(E, d, h, scale=h**-0.5),
    )


def step_of(run, inputs, backward):
    leaves, grad = [t for t in inputs if t.requires_grad], torch.randn_like(inputs[0])

    def step():
        if backward:
            torch.autograd.grad(run(*inputs), leaves, grad)
        else:
            with torch.no_grad():
                run(*inputs)

    return step


def measure_in_turn(steps, seconds):
    """Medians {name: seconds}: rounds of all steps until the time is over, two at least. One slow call is enough."""
    start = time.perf_counter()

    def timed(step):
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    first = {name: timed(step) for name, step in steps.items()}
    quick = [name for name in steps if first[name] <= 8 * first["ours"] or first[name] < 0.05]
    found = {name: [] if name in quick else [first[name]] for name in steps}
    rounds = 0
    while rounds < 2 or (rounds < 50 and time.perf_counter() - start < seconds):
        for name in quick:
            found[name].append(timed(steps[name]))
        rounds += 1
    return {name: statistics.median(times) for name, times in found.items()}


def measure(case, dtype, backward, seconds):
    T, d, h, E, k, activation = case
    inputs, act = inputs_of(case, dtype), THEIRS[activation]
    runs = {"ours": ours(activation, E, d, h), "grouped_mm": grouped_mm(act)}
    runs |= {"loop, index_add": loop_with_index_add(act), "loop, split": loop_over_split(act)}
    steps = {name: step_of(run, inputs, backward) for name, run in runs.items()}
    if T * k // E >= 256:
        dense = peers.DenseChain(T * k, d, h, dtype, gated=activation != "gelu")
        steps["dense"] = dense.forward_backward if backward else dense.forward
    times = measure_in_turn(steps, seconds)
    mine, dense_time = times.pop("ours"), times.pop("dense", None)
    best = min(times, key=times.__getitem__)
    row = {"shape": str(case[:5]), "activation": activation, "dtype": str(dtype).removeprefix("torch.")}
    row |= {"pass": "fwd+bwd" if backward else "fwd", "ms": mine * 1e3, "best peer": best}
    return row | {"ratio": times[best] / mine, "dense": dense_time and dense_time / mine}


def summary(rows, threads):
    """The row of docs/measurements.md: worst and median ratio for each dtype and pass, then the worst of dense."""
    machine = common.machine()
    cells = [f"{machine['cpu']}, {ops.cpu_isa()}, {threads} threads"]
    for dtype in ("float32", "bfloat16"):
        for name in ("fwd", "fwd+bwd"):
            ratios = [row["ratio"] for row in rows if (row["dtype"], row["pass"]) == (dtype, name)]
            cells.append(f"{min(ratios):.2f}, {statistics.median(ratios):.2f}" if ratios else "")
    dense = [row["dense"] for row in rows if row["dense"] and row["dtype"] == "float32"]
    cells += [f"{min(dense):.2f}" if dense else "", common.commit()]
    header = ["processor", "float32 fwd: worst, median", "fwd+bwd", "bfloat16 fwd", "fwd+bwd", "of dense"]
    return common.table([*header, "commit"], [cells])


def report(rows):
    lines = []
    for row in rows:
        first = [row[name] for name in KEY]
        dense = f"{row['dense']:.2f}" if row["dense"] else ""
        lines.append([*first, f"{row['ms']:.2f}", f"{row['ratio']:.2f}", row["best peer"], dense])
    header = ["(T, d, h, E, k)", "activation", "dtype", "pass", "ms", "x best peer", "best peer", "of dense"]
    return common.table(header, lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=180, help="for all cases (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--shapes", default=f"1-{len(CASES)}", help="first-last (default: %(default)s)")
    parser.add_argument("--passes", default="fwd,fwd+bwd")
    parser.add_argument(
        "--out", type=Path, help="a JSON file, which keeps its other cases; the table is written beside it"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    dtypes = [getattr(torch, name) for name in args.dtypes.split(",")]
    first, last = map(int, args.shapes.split("-"))
    passes = [name == "fwd+bwd" for name in args.passes.split(",")]
    todo = [(c, dtype, b) for dtype in dtypes for c in CASES[first - 1 : last] for b in passes]
    rows, end = [], time.perf_counter() + args.seconds
    for i, case in enumerate(todo):
        if time.perf_counter() >= end:
            print(
                f"{len(todo) - i} of {len(todo)} cases are left out: the {args.seconds:.0f} seconds are over"
            )
            break
        rows.append(measure(*case, (end - time.perf_counter()) / (len(todo) - i)))
        print(*rows[-1].values(), flush=True)
    if args.out:
        rows = common.merged(args.out, rows, KEY)
        shapes = [str(case[:5]) for case in CASES]
        rows.sort(key=lambda row: (row["dtype"] != "float32", shapes.index(row["shape"]), row["pass"]))
    text = f"{report(rows)}\n\n{summary(rows, args.threads)}"
    print("\n" + text)
    if args.out:
        command = " ".join(["python -m benchmarks.bench_here", *sys.argv[1:]])
        common.write(args.out, command, {"rows": rows}, text)


if __name__ == "__main__":
    main()
