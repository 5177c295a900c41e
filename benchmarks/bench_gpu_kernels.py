"""Every kernel of the expert layer on a GPU: its time in a forward and backward, and what roofline.py expects.

    python -m benchmarks.bench_gpu_kernels                     models at 16,384 tokens and fewer
    python -m benchmarks.bench_gpu_kernels --shapes Qwen:16384,OLMoE:4096
    python -m benchmarks.bench_gpu_kernels --dry-run           the same steps on the CPU, tiny, without times

Times are those of torch's profiler, medians over the calls of all rounds; results in results/gpu_kernels.json.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bench_gpu_layer, common, gpu_peers, gpu_timing, roofline

SHAPES = (
    "Qwen:16384,OLMoE:16384,GPT-OSS:16384,DeepSeek:16384,Mixtral:4096,E64:16384,Qwen:4096,OLMoE:4096,Qwen:256"
)
CALLS, ROUNDS = 4, 3
WORKS = {  # part of a kernel's name: the works of benchmarks/roofline.py that it does, in the order of its launches
    "up_kernel": ("F1 up",),
    "up_turns": ("F1 up",),
    "rows_by_weight": ("F2 rows_by_weight", "B3 grad_input"),
    "grad_hidden": ("B1 grad_hidden",),
    "grad_weight": ("B2 grad_weight of w2", "B5 grad_weight of w1"),
    "unpermute": ("F3 combine", "B4 sum of rows"),
}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"name:tokens, comma-separated (default: {SHAPES})")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_kernels.json")
    parser.add_argument(
        "--once", action="store_true", help="one step of each shape, no times: for a profiler"
    )
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on the CPU")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the steps on the CPU")
    return args


def shape_of(text):
    name, T = text.split(":")
    found = [shape for shape in roofline.MODELS if name.lower() in shape.name.lower()]
    if len(found) != 1:
        names = ", ".join(shape.name for shape in roofline.MODELS)
        raise SystemExit(f"{name} is not a part of the name of one shape: {names}")
    return found[0], int(T)


def kernel_seconds(device, step):
    """{work: [seconds, ...]} of CALLS calls; what is no work of ours is "routing and the rest", summed over a call."""
    if not device.is_cuda:
        step()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    seconds, seen, rest = {}, dict.fromkeys(WORKS, 0), 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        part = next((part for part in WORKS if part in event.name), None)
        if part is None:
            rest += event.device_time * 1e-6
            continue
        work = WORKS[part][seen[part] % len(WORKS[part])]
        seen[part] += 1
        seconds.setdefault(work, []).append(event.device_time * 1e-6)
    return seconds | {"routing and the rest": [rest / CALLS]}


def measure(device, shape, T, ceilings, once=False):
    """A row of results for each kernel; with once, one step and no rows."""
    (inputs, *_), w1, w2 = bench_gpu_layer.make_inputs(device, shape, T, torch.bfloat16, seed=T)
    grad = torch.empty_like(inputs[0]).normal_()
    layer = gpu_peers.makers(shape.gated)["fmoe_ext"](w1, w2)

    def step():
        return bench_gpu_layer.step_of(layer, inputs, grad)

    step()
    if once:
        device.synchronize()
        return []
    seconds = {}
    for _ in range(ROUNDS):
        for work, times in kernel_seconds(device, step).items():
            seconds.setdefault(work, []).extend(times)
    works = {work.name: work for part in roofline.kernels(shape, T) for work in part}
    rows = []
    for name, times in sorted(seconds.items(), key=lambda item: [*works, item[0]].index(item[0])):
        row = {"shape": shape.name, "T": T, "kernel": name, "seconds": common.summary(times)}
        if name in works:
            work, median = works[name], statistics.median(times)
            row |= {"tflops": work.flops / median / 1e12, "tb_a_second": work.bytes / median / 1e12}
            row |= {"expected": work.expected_seconds(ceilings), "roofline": work.seconds(ceilings)}
        rows.append(row)
    return rows


def report(rows):
    lines = []
    for row in rows:
        median = row["seconds"]["median"]
        line = [row["shape"], row["T"], row["kernel"], f"{median * 1e3:.3f}"]
        if "tflops" in row:
            line += [f"{row['tflops']:.0f}" if row["tflops"] else "", f"{row['tb_a_second']:.2f}"]
            line += [f"{row['expected'] * 1e3:.3f}", f"{row['roofline'] / median:.2f}"]
        lines.append(line + [""] * (8 - len(line)))
    return common.table(
        ["shape", "T", "kernel", "ms", "TFLOP/s", "TB/s", "expected ms", "of roofline"], lines
    )


def main(argv=None):
    args = parse(argv)
    device = gpu_timing.Device("cpu" if args.dry_run else "cuda")
    ceilings = gpu_timing.measure_ceilings(device, *((64, 2) if args.dry_run else (8192, 20)))
    print(f"ceilings: {ceilings.flops / 1e12:.1f} TFLOP/s, {ceilings.bandwidth / 1e12:.3f} TB/s", flush=True)
    chosen = [shape_of(text) for text in args.shapes.split(",")]
    if args.dry_run:
        chosen = [(replace(chosen[0][0], D=32, H=16, E=4, K=2), 24)]
    rows = []
    for shape, T in chosen:
        rows += measure(device, shape, T, ceilings, args.once)
        if device.is_cuda:
            torch.cuda.empty_cache()
    if args.once:
        return
    text = report(rows)
    print(text)
    command = " ".join(["python -m benchmarks.bench_gpu_kernels", *(sys.argv[1:] if argv is None else argv)])
    common.write(args.out, command, {"ceilings": vars(ceilings), "rows": rows}, text)


if __name__ == "__main__":
    main()
