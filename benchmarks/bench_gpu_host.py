"""Host time of operators, gate and layer on a GPU: how long a call keeps the CPU before it returns.

    python -m benchmarks.bench_gpu_host                 200 repetitions at 64, 1,024 and 4,096 tokens
    python -m benchmarks.bench_gpu_host --dry-run       the same steps on the CPU, where the figures include the work

Every count of tokens has a process of its own, in which no profiler has run. The device is idle when a call begins. An
empty launch and the replay of a CUDA graph are the least that a step can take.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks import common, gpu_timing
from fmoe_ext import FMoETransformerMLP, ops
from fmoe_ext.gpu.target import captured

TOKENS = (64, 1024, 4096)
E, K, D, H = 64, 8, 2048, 1024  # OLMoE-1B-7B
TINY = (4, 2, 32, 16)
REPEATS, WARM_UP = 200, 20


def steps_of(device, T, sizes):
    """{name: a call whose host time is measured}"""
    E, K, D, H = sizes
    dtype = torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device.name):
        x = torch.randn(T, D, dtype=dtype, requires_grad=True)
        logits = torch.randn(T, E)
        w1 = nn.Parameter(torch.randn(E, 2 * H, D, dtype=dtype))
        w2 = nn.Parameter(torch.randn(E, D, H, dtype=dtype))
        grad, one = torch.randn(T, D, dtype=dtype), torch.zeros(1)
        layer = FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate="softmax", bias=False, dtype=dtype)
    topk_weights, topk_idx = logits.topk(K)
    topk_weights = topk_weights.softmax(1).requires_grad_()
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, E)

    def experts():
        return ops.expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, "swiglu")

    def both(forward, *leaves):
        return lambda: torch.autograd.grad(forward(), leaves, grad)

    def gate():
        return layer.gate(x)

    def gate_and_backward():  # two float32 products in the backward: of the tokens' gradient and of the weight's
        _, weights = gate()
        return torch.autograd.grad(weights.sum(), (x, *layer.gate.parameters()))

    steps = {
        "empty launch": lambda: one.zero_(),
        "sort_tokens": lambda: ops.sort_tokens(topk_idx, E),
        "topk_gate": lambda: ops.topk_gate(logits, K),
        "expert_mlp, no gradient": torch.no_grad()(experts),
        "expert_mlp, forward": experts,
        "expert_mlp, forward and backward": both(experts, x, w1, w2, topk_weights),
        "gate, forward": gate,
        "gate, forward and backward": gate_and_backward,
        "FMoE, forward": lambda: layer(x),
        "FMoE, forward and backward": both(lambda: layer(x), x, *layer.experts.parameters()),
    }
    if device.is_cuda:
        steps["FMoE, forward and backward, CUDA graph"] = captured(steps["FMoE, forward and backward"])
    return steps


def host_seconds(device, step, repeats):
    """Times until step's call returns, each from an idle device."""
    seconds = []
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    device.synchronize()
    return seconds


def measure(device, T, sizes, repeats, warm_up):
    rows = []
    for name, step in steps_of(device, T, sizes).items():
        try:
            host_seconds(device, step, warm_up)
            seconds = host_seconds(device, step, repeats)
        except RuntimeError as error:  # a step that cannot be captured is named, the others are measured
            rows.append({"T": T, "step": name, "error": str(error).splitlines()[0]})
            continue
        rows.append({"T": T, "step": name, "seconds": common.summary(seconds)})
    return rows


def report(rows):
    def cells(row):
        if "error" in row:
            return [row["T"], row["step"], "", "", row["error"]]
        return [
            row["T"],
            row["step"],
            *(f"{row['seconds'][name] * 1e6:.1f}" for name in ("median", "min")),
            "",
        ]

    return common.table(["T", "step", "median us", "least us", "error"], [cells(row) for row in rows])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=TOKENS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_host.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, three repetitions")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)  # tokens; prints rows as JSON
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the steps on the CPU")
    if args.child is not None:
        device = gpu_timing.Device("cpu" if args.dry_run else "cuda")
        sizes, repeats, warm_up = (TINY, 3, 1) if args.dry_run else ((E, K, D, H), args.repeats, WARM_UP)
        print(json.dumps(measure(device, args.child, sizes, repeats, warm_up)))
        return
    rows = []
    for T in args.tokens[:1] if args.dry_run else args.tokens:
        command = [sys.executable, "-m", "benchmarks.bench_gpu_host", "--child", str(T)]
        command += ["--repeats", str(args.repeats)] + ["--dry-run"] * args.dry_run
        result = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=240
        )
        if result.returncode:
            sys.exit(f"{T} tokens: {result.stderr[-2000:]}")
        rows += json.loads(result.stdout.splitlines()[-1])
    text = report(rows)
    print(text)
    command = " ".join(["python -m benchmarks.bench_gpu_host", *(sys.argv[1:] if argv is None else argv)])
    common.write(args.out, command, {"rows": rows, "sizes": {"E": E, "K": K, "D": D, "H": H}}, text)


if __name__ == "__main__":
    main()
