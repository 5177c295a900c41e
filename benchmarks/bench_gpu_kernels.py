"""Every kernel of the expert layer on a GPU: its time in a forward and backward, and what roofline.py expects.

    python -m benchmarks.bench_gpu_kernels                     models at 16,384 tokens and fewer
    python -m benchmarks.bench_gpu_kernels --shapes Qwen:16384,OLMoE:4096
    python -m benchmarks.bench_gpu_kernels --dry-run           the same steps on the CPU, tiny, without times

Times are those of torch's profiler, medians over the calls of all rounds; results in results/gpu_kernels.json.
Weight gradients are timed as bfloat16 tensors and as sums in float32 main gradients.
Torch's grouped_mm alone is timed by events beside our products. So are products with frozen weights in MXFP4
(--frozen): one pass decodes them in memory, for grouped_gemm and for torch's grouped_mm in turn.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bench_gpu_layer, bench_gpu_main_grads, common, gpu_peers, gpu_timing, roofline
from fmoe_ext import frozen, ops

SHAPES = (
    "Qwen:16384,OLMoE:16384,GPT-OSS:16384,DeepSeek:16384,Mixtral:4096,E64:16384,Qwen:4096,OLMoE:4096,Qwen:256"
)
FROZEN = "GPT-OSS:16384,GPT-OSS:256,Qwen:4096"
CALLS, ROUNDS = 4, 3
MAIN = " into main gradients"
WORKS = {  # part of a kernel's name: the works of benchmarks/roofline.py that it does, in the order of its launches
    "up_kernel": ("F1 up",),
    "rows_by_weight": ("F2 rows_by_weight", "B3 grad_input"),
    "grad_hidden": ("B1 grad_hidden",),
    "grad_weight": ("B2 grad_weight of w2", "B5 grad_weight of w1"),
    "unpermute": ("F3 combine", "B4 sum of rows"),
}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"name:tokens, comma-separated (default: {SHAPES})")
    parser.add_argument(
        "--frozen", default=FROZEN, help=f"the same for frozen weights in MXFP4 (default: {FROZEN})"
    )
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
    layers = {
        "": gpu_peers.makers(shape.gated)["fmoe_ext"](w1, w2),
        MAIN: bench_gpu_main_grads.layers_of(shape.gated, w1, w2, False)["fmoe_ext"],
    }
    seconds = {}
    for suffix, layer in layers.items():

        def step(layer=layer):
            return bench_gpu_layer.step_of(layer, inputs, grad)

        step()
        if once:
            continue
        for _ in range(ROUNDS):
            for work, times in kernel_seconds(device, step).items():
                if not suffix or "grad_weight" in work:
                    seconds.setdefault(work + suffix, []).extend(times)
    if once:
        device.synchronize()
        return []
    works = {work.name: work for part in roofline.kernels(shape, T) for work in part}
    for name, weight in (("B2 grad_weight of w2", w2), ("B5 grad_weight of w1", w1)):
        read_and_written = works[name].bytes + weight.numel() * (2 * 4 - roofline.BYTES)
        works[name + MAIN] = replace(works[name], name=name + MAIN, bytes=read_and_written)
    rows = []
    for name, times in sorted(seconds.items(), key=lambda item: [*works, item[0]].index(item[0])):
        row = {"shape": shape.name, "T": T, "kernel": name, "seconds": common.summary(times)}
        if name in works:
            work, median = works[name], statistics.median(times)
            row |= {"tflops": work.flops / median / 1e12, "tb_a_second": work.bytes / median / 1e12}
            row |= {"expected": work.expected_seconds(ceilings), "roofline": work.seconds(ceilings)}
        rows.append(row)
    return rows


def frozen_products(x, weight, offs, grad):
    """{implementation: (y of rows x, dx of rows grad)}, functions."""
    scale, zero, *options = weight.packing()

    def decoded():
        return torch.ops.fmoe_ext._decode_packed(weight.rows(), scale, zero, *options, x.dtype)

    return {
        "decoded, grouped_gemm": (
            lambda: ops.grouped_gemm(x, decoded(), offs),
            lambda _: ops.grouped_gemm(grad, decoded(), offs, transposed=True),
        ),
        "decoded, grouped_mm": (
            lambda: torch.nn.functional.grouped_mm(x, decoded().mT, offs=offs),
            lambda _: torch.nn.functional.grouped_mm(grad, decoded(), offs=offs),
        ),
    }


def measure_frozen(device, shape, T, ceilings):
    """Rows of results: w1 of a model in MXFP4, forward and gradient of the rows, by each implementation."""
    generator = torch.Generator(device.name).manual_seed(T)
    E, R = shape.E, T * shape.K
    size = (E, shape.F, shape.D // 32)
    options = {"device": device.name, "dtype": torch.uint8, "generator": generator}
    data = torch.randint(0, 256, (*size, 16), **options)
    weight = frozen.Quantized("mxfp4", data, torch.randint(118, 122, size, **options))
    x, grad = (torch.randn(R, n, device=device.name).bfloat16() for n in (shape.D, shape.F))
    offs = (torch.arange(1, E + 1, device=device.name) * R // E).int()
    steps = {name: [pair] for name, pair in frozen_products(x, weight, offs, grad).items()}
    with torch.no_grad():
        times = gpu_timing.time_interleaved(device, steps, 0.1 if device.is_cuda else 0.0, ROUNDS)
    work = roofline.Work("frozen", 2 * R * shape.F * shape.D, weight.nbytes + x.nbytes + grad.nbytes)
    rows = []
    for direction, product in enumerate(("y", "dx")):
        for name in times:
            seconds = [pair[direction] for pair in times[name]]
            row = {"shape": shape.name, "T": T, "kernel": f"MXFP4 w1, {product}, {name}"}
            median = statistics.median(seconds)
            row |= {"seconds": common.summary(seconds), "tflops": work.flops / median / 1e12}
            row |= {"tb_a_second": work.bytes / median / 1e12, "roofline": work.seconds(ceilings)}
            rows.append(row)
    return rows


def measure_torch(device, shape, T, ceilings):
    """Rows of results: torch's grouped_mm alone for the three products of w1, by cuBLASLt too where torch has it."""
    E, R = shape.E, T * shape.K
    x, grad = (torch.randn(R, n, device=device.name).bfloat16() for n in (shape.D, shape.F))
    weight = torch.randn(E, shape.F, shape.D, device=device.name).bfloat16()
    offs = (torch.arange(1, E + 1, device=device.name) * R // E).int()
    multiply = torch.nn.functional.grouped_mm
    products = {
        "x w1^T": lambda: multiply(x, weight.mT, offs=offs),
        "dh w1": lambda: multiply(grad, weight, offs=offs),
        "dh^T x": lambda: multiply(grad.mT, x, offs=offs),
    }
    matmul = torch.backends.cuda.matmul
    switch = "prefer_cublaslt_grouped_gemm"
    rows = []
    for by_cublaslt in (False, True) if hasattr(matmul, switch) else (False,):
        if by_cublaslt:
            setattr(matmul, switch, True)
        steps = {name: [(product, lambda _: None)] for name, product in products.items()}
        times = gpu_timing.time_interleaved(device, steps, 0.1 if device.is_cuda else 0.0, ROUNDS)
        work = roofline.Work("torch", 2 * R * shape.F * shape.D, x.nbytes + grad.nbytes + weight.nbytes)
        for name in products:
            seconds = [pair[0] for pair in times[name]]
            median = statistics.median(seconds)
            row = {"shape": shape.name, "T": T, "kernel": f"grouped_mm{', cuBLASLt' * by_cublaslt}, {name}"}
            row |= {"seconds": common.summary(seconds), "tflops": work.flops / median / 1e12}
            rows.append(row | {"tb_a_second": work.bytes / median / 1e12, "roofline": work.seconds(ceilings)})
        if by_cublaslt:
            setattr(matmul, switch, False)
    return rows


def report(rows):
    lines = []
    for row in rows:
        median = row["seconds"]["median"]
        line = [row["shape"], row["T"], row["kernel"], f"{median * 1e3:.3f}"]
        if "tflops" in row:
            line += [f"{row['tflops']:.0f}" if row["tflops"] else "", f"{row['tb_a_second']:.2f}"]
            expected = f"{row['expected'] * 1e3:.3f}" if "expected" in row else ""
            line += [expected, f"{row['roofline'] / median:.2f}"]
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
        if not args.once:
            rows += measure_torch(device, shape, T, ceilings)
        if device.is_cuda:
            torch.cuda.empty_cache()
    if args.once:
        return
    for shape, T in [(chosen[0][0], 24)] if args.dry_run else map(shape_of, args.frozen.split(",")):
        rows += measure_frozen(device, shape, T, ceilings)
        if device.is_cuda:
            torch.cuda.empty_cache()
    text = report(rows)
    print(text)
    command = " ".join(["python -m benchmarks.bench_gpu_kernels", *(sys.argv[1:] if argv is None else argv)])
    common.write(args.out, command, {"ceilings": vars(ceilings), "rows": rows}, text)


if __name__ == "__main__":
    main()
