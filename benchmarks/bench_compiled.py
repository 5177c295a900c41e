"""Host time of a training step of small layers, torch.compile against eager, in turn; our kernels compute nothing.

    python -m benchmarks.bench_compiled                       naive, softmax and sigmoid gates, 1 and 12 layers
    python -m benchmarks.bench_compiled --layers 4 --rounds 9

64 tokens, width 16, 4 experts, top 2, float32, one thread; bench_host's stubs take the place of our operators. "two
linear layers and a GELU" shows what a compiled call costs by itself. A figure is processor time: medians of the rounds,
and the median of their ratios. tests/compiled compares what is computed.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

from benchmarks import bench_host, common
from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import total_loss

T, D, H, E = 64, 16, 32, 4
WARM_UP, SECONDS_A_ROUND = 30, 0.3


class Blocks(nn.Module):
    """num_layers layers, each added to its input -> the output and the gates' losses."""

    def __init__(self, gate, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(FMoETransformerMLP(E, D, H, gate=gate) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x, total_loss(self)


class Dense(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))

    def forward(self, x):
        return super().forward(x), 0


def step(model, x):
    y, loss = model(x)
    (y.square().sum() + loss).backward()


def microseconds(model, x, seconds):
    """Processor time of a step, of the mean over `seconds`."""
    count, begin, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        step(model, x)
        for p in model.parameters():
            p.grad = None
        count += 1
    return (time.process_time() - begin) / count * 1e6


def measure(model, rounds):
    """Medians of microseconds, eager and compiled, and of the ratio in a round."""
    torch.compiler.reset()
    x = torch.randn(T, D)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(WARM_UP):
        step(model, x), step(compiled, x)
    times = [[microseconds(m, x, SECONDS_A_ROUND) for m in (model, compiled)] for _ in range(rounds)]
    eager, ours = (statistics.median(column) for column in zip(*times, strict=True))
    return eager, ours, statistics.median(b / a for a, b in times)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="1,12", help="numbers of layers")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = {
        f"{gate}, {count} layer{'s' * (count > 1)}": Blocks(gate, count)
        for count in map(int, args.layers.split(","))
        for gate in ("naive", "softmax", "sigmoid")
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.ops.load_library(bench_host.build(folder))
    print(common.machine(), common.commit())
    for name, model in {**models, "two linear layers and a GELU": Dense()}.items():
        eager, compiled, ratio = measure(model, args.rounds)
        print(f"{name}: {eager:.0f} us eager, {compiled:.0f} us compiled, {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
