"""Parts of B1 and B2 left out one at a time on a GPU: what the epilogue, the activation and the index cost.

    python -m benchmarks.bench_gpu_ablations              compiles (nvcc, a minute on 8 cores) and times
    python -m benchmarks.bench_gpu_ablations --dry-run    inputs and tables on the CPU; compiles and launches nothing

A part costs what its absence saves, beside the whole kernel in the same run. Without a part the results are wrong.
"""

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bench_gpu_layer, common, gpu_timing, roofline
from fmoe_ext import ops

ROOT = Path(__file__).parents[1]
SHAPES = ("Qwen3-30B-A3B", "FastMoE E64", "Mixtral-8x7B")
SOURCES = ("benchmarks/ablations.cu", "cuda/sm90_grad_hidden.cu", "cuda/sm90_grad_weight.cu")
TOKENS, CALLS = 16384, 20
WITHOUT = {
    "nothing": 0,
    "epilogue": 1,
    "activation": 2,
    "index": 4,
}  # bits of FMOE_WITHOUT in cuda/common.cuh
KERNELS = {  # name: (tile columns of B1 or blocks a cluster of B2, parts that it has)
    "B1 128x128": (128, ("nothing", "epilogue", "activation", "index")),
    "B1 128x256": (256, ("nothing", "epilogue", "activation", "index")),
    "B2": (1, ("nothing", "epilogue", "index")),
    "B2 in pairs": (2, ("nothing", "epilogue", "index")),
}


def command(part, out):
    return [
        *(
            "nvcc",
            "-std=c++20",
            "-O3",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            f"-I{ROOT / 'csrc'}",
            f"-I{ROOT / 'cuda'}",
        ),
        *(f"-DFMOE_WITHOUT={WITHOUT[part]}", "-gencode=arch=compute_90a,code=sm_90a"),
        *(str(ROOT / source) for source in SOURCES),
        *("-o", str(out)),
    ]


def compiled(folder):
    """{part that is left out: the library}"""

    def build(part):
        out = Path(folder, f"without_{part}.so")
        result = subprocess.run(command(part, out), capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"nvcc failed:\n{result.stderr[-3000:]}")
        library = ctypes.CDLL(str(out))
        library.grad_hidden.restype = library.grad_weight.restype = ctypes.c_char_p
        return library

    with ThreadPoolExecutor(len(WITHOUT)) as pool:
        return dict(zip(WITHOUT, pool.map(build, WITHOUT), strict=True))


def problem(device, shape, T):
    """(arguments of grad_hidden, of grad_weight), without grid and stream."""
    ((x, topk_idx, topk_weights), *_), _, w2 = bench_gpu_layer.make_inputs(
        device, shape, T, torch.bfloat16, T
    )
    _, offs, row_idx, _ = ops.sort_tokens(topk_idx, shape.E)
    R = row_idx.numel()
    new = lambda *size, dtype=torch.bfloat16: torch.empty(size, dtype=dtype, device=device.name)  # noqa: E731
    h, weights = new(R, shape.F).normal_(), topk_weights.detach().flatten().float().contiguous()
    dh, scaled_a, dw2 = new(R, shape.F), new(R, shape.H).normal_(), new(shape.E, shape.D, shape.H)
    dots = new(R, -(-shape.H // 128), dtype=torch.float32)
    order = offs.diff(prepend=offs.new_zeros(1)).argsort(descending=True, stable=True).int()
    sizes = (ctypes.c_int64(R), shape.E, shape.K, shape.D, shape.H)
    hidden = (int(shape.gated), x, h, offs, row_idx, weights, w2, dh, scaled_a, dots, *sizes)
    return hidden, (x, scaled_a, offs, row_idx, order, dw2, *sizes)


def as_c(value):
    return ctypes.c_void_p(value.data_ptr()) if isinstance(value, torch.Tensor) else value


def milliseconds(device, function, arguments):
    def call():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if error := function(*map(as_c, arguments), stream):
            sys.exit(error.decode())

    for _ in range(3):
        call()
    times = []
    for _ in range(CALLS):
        start = device.mark()
        call()
        times.append((start, device.mark()))
    device.synchronize()
    return 1e3 * statistics.median(device.seconds(*pair) for pair in times)


def measure(device, shape, T, libraries):
    hidden, weight = problem(device, shape, T)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count if device.is_cuda else 1
    rows = []
    for name, (grid, parts) in KERNELS.items():
        function, arguments = ("grad_hidden", hidden) if name.startswith("B1") else ("grad_weight", weight)
        row = {"shape": shape.name, "T": T, "kernel": name, "ms": {}}
        for part in parts:
            if libraries is not None:
                library = getattr(libraries[part], function)
                row["ms"][part] = milliseconds(device, library, (*arguments, num_sms, grid))
        rows.append(row)
    return rows


def report(rows):
    lines = []
    for row in rows:
        ms = row["ms"]
        cells = [f"{ms[part]:.3f}" if part in ms else "" for part in WITHOUT]
        lines.append([row["shape"], row["T"], row["kernel"], *cells])
    whole, *parts = WITHOUT
    return common.table(["shape", "T", "kernel", "ms", *(f"without {part}" for part in parts)], lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_ablations.json")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on the CPU; nothing is launched")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the steps on the CPU")
    device = gpu_timing.Device("cpu" if args.dry_run else "cuda")
    shapes = [shape for shape in roofline.MODELS if shape.name in SHAPES]
    if args.dry_run:
        shapes = [replace(shape, D=32, H=16, E=4, K=2) for shape in shapes]
    with tempfile.TemporaryDirectory() as folder:
        libraries = None if args.dry_run else compiled(folder)
        rows = []
        for shape in shapes:
            rows += measure(device, shape, 24 if args.dry_run else TOKENS, libraries)
            if device.is_cuda:
                torch.cuda.empty_cache()
    text = report(rows)
    print(text)
    written = " ".join(
        ["python -m benchmarks.bench_gpu_ablations", *(sys.argv[1:] if argv is None else argv)]
    )
    common.write(args.out, written, {"rows": rows}, text)


if __name__ == "__main__":
    main()
