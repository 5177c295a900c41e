"""The expert layer against its peers and the dense ceiling: time, memory, bytes saved for backward.

    python -m benchmarks.bench_layer                    all shapes, both dtypes
    python -m benchmarks.bench_layer --shapes A,D --dtypes float32 --quick

Implementations are timed in turn within one process, with the memory settings that a process begins with. For a
processor with AVX2 alone: FMOE_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.bench_layer --out benchmarks/results/layer_avx2.json
"""

import argparse
import ctypes
import gc
import os
import sys
from pathlib import Path

import torch

from benchmarks import common, peers
from fmoe_ext import ops

SHAPES = {  # T, D, H, E, K
    "A": (4096, 512, 2048, 8, 2),
    "B": (8192, 256, 512, 16, 2),
    "C": (2048, 1024, 512, 64, 8),
    "D": (64, 1024, 512, 64, 8),
    "E": (1, 1024, 512, 64, 8),
}


def make_inputs(shape, dtype, requires_grad):
    T, D, H, E, K = shape
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, E, generator=generator)
    topk_weights, topk_idx = logits.topk(K, dim=1)
    x = torch.randn(T, D, generator=generator).to(dtype).requires_grad_(requires_grad)
    topk_weights = topk_weights.softmax(1).to(dtype).requires_grad_(requires_grad)
    w1 = (torch.randn(E, 2 * H, D, generator=generator) * D**-0.5).to(dtype).requires_grad_(requires_grad)
    w2 = (torch.randn(E, D, H, generator=generator) * H**-0.5).to(dtype).requires_grad_(requires_grad)
    return x, topk_idx, topk_weights, torch.nn.Parameter(w1), torch.nn.Parameter(w2)


def step_of(run, inputs, backward):
    if not backward:

        def step():
            with torch.no_grad():
                run(*inputs)

        return step
    grad = torch.randn_like(inputs[0])
    leaves = [t for t in inputs if t.requires_grad]

    def step():
        torch.autograd.grad(run(*inputs), leaves, grad)

    return step


def saved_bytes(run, inputs):
    """Bytes that autograd keeps between forward and backward, parameters left out, shared storage counted once."""
    known = {p.untyped_storage().data_ptr() for p in inputs[3:]}
    storages = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = run(*inputs)
    del out
    return sum(storages.values())


def peak_bytes(step):
    """Growth of the resident set's high-water mark during one forward + backward."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None

    def field(name):
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    gc.collect()
    ops.release_memory()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    step()
    return field("VmHWM") - before


def measure(shapes, dtypes, rounds, skip):
    """Rows {shape, dtype, pass, implementation, median, min, max, gflops, ...}."""
    rows = []
    for name in shapes:
        T, D, H, E, K = SHAPES[name]
        flops = 6 * T * K * D * H
        for dtype_name in dtypes:
            dtype = getattr(torch, dtype_name)
            inputs = make_inputs(SHAPES[name], dtype, requires_grad=True)
            dense = peers.DenseChain(T * K, D, H, dtype)
            runs = {peer: run for peer, run in peers.implementations().items() if peer not in skip}
            for backward in (False, True):
                steps = {peer: step_of(run, inputs, backward) for peer, run in runs.items()}
                steps["dense ceiling"] = dense.forward_backward if backward else dense.forward
                seconds = common.interleave(steps, rounds)
                for peer, times in seconds.items():
                    row = {"shape": name, "dtype": dtype_name, "pass": "fwd+bwd" if backward else "fwd"}
                    row |= {"implementation": peer, **common.summary(times)}
                    row["gflops"] = flops * (3 if backward else 1) / row["median"] / 1e9
                    if backward and peer in runs:
                        row["saved_bytes"] = saved_bytes(runs[peer], inputs)
                        row["peak_bytes"] = peak_bytes(steps[peer])
                    rows.append(row)
    return rows


def report(rows):
    """Markdown table: ours as share of the dense ceiling, and against the fastest peer."""
    by_case = {}
    for row in rows:
        case = (row["shape"], row["dtype"], row["pass"])
        by_case.setdefault(case, {})[row["implementation"]] = row
    lines = []
    for case, others in by_case.items():
        mine, ceiling = others.pop("fmoe_ext"), others.pop("dense ceiling")
        name, fastest = min(others.items(), key=lambda item: item[1]["median"])
        line = [*case, f"{mine['median'] * 1e3:.2f}", f"{mine['min'] * 1e3:.2f}-{mine['max'] * 1e3:.2f}"]
        line += [f"{mine['gflops']:.0f}", f"{ceiling['median'] / mine['median']:.2f}"]
        line += [f"{fastest['median'] / mine['median']:.2f}", name]
        for field in ("saved_bytes", "peak_bytes"):
            if field not in mine:
                line.append("")
                continue
            least = min(row[field] for row in others.values())
            line.append(f"{mine[field] / 2**20:.0f} / {least / 2**20:.0f}")
        lines.append(line)
    header = [
        "shape",
        "dtype",
        "pass",
        "ms",
        "min-max",
        "GFLOP/s",
        "of dense ceiling",
        "x best peer",
        "best peer",
    ]
    header += ["saved MiB: ours / least peer", "peak MiB: ours / least peer"]
    return common.table(header, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help="letters of SHAPES (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--skip", default="", help="implementations to leave out, comma-separated")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="three rounds, nothing written")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "layer.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes, dtypes = args.shapes.split(","), args.dtypes.split(",")
    rows = measure(shapes, dtypes, 3 if args.quick else args.rounds, args.skip.split(","))
    text = report(rows)
    print(text)
    if not args.quick:
        command = " ".join(["python -m benchmarks.bench_layer", *sys.argv[1:]])
        common.write(args.out, command, rows, text)


if __name__ == "__main__":
    main()
