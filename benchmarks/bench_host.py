"""Time of the host for a step of a layer, with kernels that compute nothing.

    python -m benchmarks.bench_host                             this checkout
    python -m benchmarks.bench_host --against ../before         and another, in turn
    python -m benchmarks.bench_host --beside-linear             a small layer with its kernels, beside two nn.Linear

Each round is a fresh process without a profiler; a figure is the least of its steps, and of all rounds. The
layer is an FMoETransformerMLP of gated experts; "experts" is ops.expert_mlp alone. Products of torch (the gate's
linear layer) are of width 16, so that they are calls and little more.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
T, D, H, E, K = 64, 16, 16, 8, 2
WARM_UP = 100
NUM_LAYERS = 8


def build(folder):
    """The library of stubs -> its path."""
    from torch.utils import cpp_extension

    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    include = [f"-I{path}" for path in cpp_extension.include_paths()]
    library, torch_lib = Path(folder, "libhost_stubs.so"), Path(torch.__file__).parent / "lib"
    link = [f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_lib}"]
    source = ROOT / "benchmarks" / "host_stubs.cpp"
    subprocess.run(["g++", *flags, *include, source, "-o", library, *link], check=True)
    return library


def steps():
    """{name: a step}."""
    import fmoe_ext

    def layer(gate):
        torch.manual_seed(0)
        return fmoe_ext.FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate=gate, bias=False)

    naive, softmax = layer("naive"), layer("softmax")
    eight = torch.nn.Sequential(*(layer("naive") for _ in range(NUM_LAYERS)))
    x, grad = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    grad_weights = torch.randn(T, K)

    def whole(layer):
        def step():
            layer(x).backward(grad)
            for leaf in of_layer:
                leaf.grad = None

        of_layer = [x, *layer.parameters()]
        return step

    def gate_alone():
        naive.gate(x)[1].backward(grad_weights)

    def forward_alone():
        naive(x)

    topk_idx, topk_weights = (t.detach() for t in naive.gate(x))
    topk_weights.requires_grad_()
    handle = fmoe_ext.ops.sort_tokens(topk_idx, E)
    w1, _, w2, _ = naive.experts.weights

    def experts():
        arguments = (handle.row_idx, handle.inverse, handle.offs, w1, None, w2, None, topk_weights, "swiglu")
        fmoe_ext.ops.expert_mlp(x, *arguments).backward(grad)

    return {
        "layer": whole(naive),
        f"layer, of {NUM_LAYERS} in a row": whole(eight),
        "layer, softmax gate with its loss": whole(softmax),
        "forward of the layer": forward_alone,
        "gate": gate_alone,
        "experts": experts,
    }


def measure(repetitions):
    """{name: least microseconds of a step}; a step of a layer ends with gradients set to None, as in training."""
    torch.set_num_threads(1)
    found = {}
    for name, step in steps().items():
        for _ in range(WARM_UP):
            step()
        times = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            step()
            times.append((time.perf_counter() - begin) * 1e6)
        found[name] = min(times) / (NUM_LAYERS if "in a row" in name else 1)
    return found


def beside_linear(rounds):
    """Print the time of a layer of 8 tokens by gate, and of two nn.Linear with GELU in the same process, in turn."""
    import fmoe_ext

    torch.set_num_threads(1)
    tokens, width, experts = 8, 16, 4
    x, grad = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)
    layers = {
        "nn": torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)
        )
    }
    for gate in ("naive", "softmax", "gshard", "switch"):
        top_k = 1 if gate == "switch" else K
        layers[gate] = fmoe_ext.FMoETransformerMLP(experts, width, width, top_k=top_k, gate=gate)

    def step(layer):
        loss = getattr(layer, "gate", None) and layer.gate.get_loss
        begin = time.perf_counter()
        out = layer(x)
        balance = loss() if loss else None
        has_gradient = balance is not None and balance.requires_grad
        torch.autograd.backward(
            [out, balance] if has_gradient else [out], [grad, None] if has_gradient else [grad]
        )
        spent = time.perf_counter() - begin
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        return spent * 1e6

    for layer in layers.values():
        for _ in range(WARM_UP):
            step(layer)
    least = {name: [] for name in layers}
    for _ in range(rounds):
        for name, layer in layers.items():
            least[name].append(min(step(layer) for _ in range(30)))
    for name, times in least.items():
        of_nn = sorted(a / b for a, b in zip(times, least["nn"], strict=True))
        of_naive = statistics.median(a / b for a, b in zip(times, least["naive"], strict=True))
        quarter = len(of_nn) // 4
        print(
            f"{name}: least {min(times):.1f} us; of nn.Linear {statistics.median(of_nn):.2f} "
            f"({of_nn[quarter]:.2f} to {of_nn[-1 - quarter]:.2f}), of naive {of_naive:.2f}"
        )


def in_process(checkout, library, repetitions):
    """measure() of a checkout, by its package and this file."""
    command = [sys.executable, __file__, "--library", str(library), "--repetitions", str(repetitions)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other checkouts, built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument(
        "--beside-linear", action="store_true", help="with kernels, beside two nn.Linear with GELU"
    )
    parser.add_argument("--library", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.beside_linear:
        return beside_linear(20 * args.rounds)
    if args.library is not None:
        import fmoe_ext  # noqa: F401  # the operators, before others take their place

        torch.ops.load_library(args.library)
        print(json.dumps(measure(args.repetitions)))
        return
    checkouts = [ROOT, *args.against]
    rounds = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        library = build(folder)
        for _ in range(args.rounds):
            for checkout in checkouts:
                rounds[checkout].append(in_process(checkout, library, args.repetitions))
    for name in rounds[ROOT][0]:
        least = [min(found[name] for found in rounds[checkout]) for checkout in checkouts]
        ratios = [
            statistics.median(b[name] / a[name] for a, b in zip(rounds[ROOT], rounds[c], strict=True))
            for c in args.against
        ]
        others = "".join(
            f", {c.name} {us:.1f} us ({ratio:.2f} of it)"
            for c, us, ratio in zip(args.against, least[1:], ratios, strict=True)
        )
        print(f"{name}: {least[0]:.1f} us{others}")


if __name__ == "__main__":
    main()
