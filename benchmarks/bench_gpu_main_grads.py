"""The backward of the expert layer on a GPU with weight gradients added to float32 main gradients, as in Megatron.

    python -m benchmarks.bench_gpu_main_grads              Qwen3-30B-A3B and Mixtral-8x7B, 16,384 tokens
    python -m benchmarks.bench_gpu_main_grads --dry-run    the same steps on the CPU with tiny shapes

Ours adds inside the kernels of the weight gradients. The peer is the compiled pipeline on grouped_mm, which adds its
bfloat16 gradients afterwards. Both are compared before they are timed.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import bench_gpu_layer, common, gpu_peers, gpu_timing, roofline
from fmoe_ext import ops

SHAPES = "Qwen3-30B-A3B,Mixtral-8x7B"
TOKENS, ROUNDS, SECONDS_A_ROUND = 16384, 3, 0.1


class AddToMain(torch.autograd.Function):
    """The weight itself; its gradient is added to main instead of being returned."""

    @staticmethod
    def forward(ctx, weight, main):
        ctx.main = main
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.main.add_(grad)
        return None, None


def layers_of(gated, w1, w2, compiled):
    """{name: gpu_peers.Layer}: the weights' gradients go to their main_grad."""
    own, others = ([torch.zeros_like(w, dtype=torch.float32) for w in (w1, w2)] for _ in range(2))
    w1.main_grad, w2.main_grad = own
    fused = (ops.MainGrad(w1), ops.MainGrad(w2))
    steps = gpu_peers.FusedSteps(gated, compiled)
    activation = "swiglu" if gated else "gelu"

    def ours(x, topk_idx, topk_weights):
        _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, w1.size(0))
        index = (row_idx, inverse, offs)
        return ops.expert_mlp(x, *index, w1, None, w2, None, topk_weights, activation, main_grads=fused)

    def peer(x, topk_idx, topk_weights):
        weights = (AddToMain.apply(w, main) for w, main in zip((w1, w2), others, strict=True))
        return gpu_peers.CompiledPipeline.apply(x, topk_idx, topk_weights, *weights, steps)

    def take_from(mains):
        def take(*_):
            found = [main.clone() for main in mains]
            for main in mains:
                main.zero_()
            return found

        return take

    return {
        "fmoe_ext": gpu_peers.Layer(ours, (w1, w2), take_from(own)),
        f"{gpu_peers.RECORD}, then added": gpu_peers.Layer(peer, (w1, w2), take_from(others)),
    }


def measure(device, shape, T, compiled, rounds=ROUNDS, seconds_a_round=SECONDS_A_ROUND):
    """A row of results for each implementation."""
    sets, w1, w2 = bench_gpu_layer.make_inputs(device, shape, T, torch.bfloat16, T)
    grad = torch.empty_like(sets[0][0]).normal_()
    layers = layers_of(shape.gated, w1, w2, compiled)
    facts, left_out = bench_gpu_layer.usable(device, layers, sets[0], grad)
    if left_out:
        sys.exit(f"{shape.name}: {left_out}")
    steps = {name: bench_gpu_layer.steps_of(layer, sets, grad) for name, layer in layers.items()}
    times = gpu_timing.time_interleaved(device, steps, seconds_a_round, rounds)
    rows = []
    for name in layers:
        row = {"shape": shape.name, "T": T, "implementation": name, **facts[name]}
        backward = common.summary([measured[1] for measured in times[name]])
        row["backward"] = backward | {"tflops": 2 * roofline.flops(shape, T) / backward["median"] / 1e12}
        rows.append(row)
    return rows


def report(rows):
    """Markdown table with the ratio to ours."""
    ours = {row["shape"]: row["backward"]["median"] for row in rows if row["implementation"] == "fmoe_ext"}
    lines = []
    for row in rows:
        median = row["backward"]["median"]
        ratio = f"{median / ours[row['shape']]:.2f}"
        line = [row["shape"], row["T"], row["implementation"], f"{median * 1e3:.3f}"]
        lines.append([*line, f"{row['backward']['tflops']:.0f}", ratio])
    return common.table(["shape", "T", "implementation", "bwd ms", "TFLOP/s", "times ours"], lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help=f"names, comma-separated (default: {SHAPES})")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "gpu_main_grads.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: use --dry-run to try the steps on the CPU")
    device = gpu_timing.Device("cpu" if args.dry_run else "cuda")
    chosen = [(shape, TOKENS) for shape in roofline.MODELS if shape.name in args.shapes.split(",")]
    timing = ()
    if args.dry_run:
        chosen = [(replace(shape, D=32, H=16, E=4, K=2), 24) for shape, _ in chosen]
        timing = (1, 0.0)
    rows = []
    for shape, T in chosen:
        rows += measure(device, shape, T, not args.dry_run, *timing)
        if device.is_cuda:
            torch.cuda.empty_cache()
    text = report(rows)
    print(text)
    command = " ".join(
        ["python -m benchmarks.bench_gpu_main_grads", *(sys.argv[1:] if argv is None else argv)]
    )
    common.write(args.out, command, {"rows": rows}, text)


if __name__ == "__main__":
    main()
