"""What a pipeline costs: schedules against their bubble formula, exchanges hidden by overlap, backward in two parts.

    python -m benchmarks.bench_pipeline [--rounds 5] [--only schedules|overlap|backward]

schedules: a step on 2 gloo processes, of this package and of torch.distributed.pipelining alone, against one process
that accumulates the same microbatches. "of the ideal" is (m + p - 1) / m of one process's time divided by p ranks,
over the measured time. Layers compute, and layers that sleep, which other load on the machine does not slow down.
overlap: dualpipe_v on a rank that stands for many alike. Computations and messages take their time on a clock of
their own, which other load on the machine does not change: attention and experts 1 each in the forward and 2 in the
backward. "hidden" is (A - B) / (A - C): A without overlap, B with it, C without a network. The first and last
microbatches of a step have nothing to be hidden behind, which is part of the figure.
backward: expert_mlp's whole backward, and that of its inputs and then of its weights.
Rounds are interleaved; figures are medians, ratios the medians of the rounds' ratios.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.bench_ep import SleepingExpert
from benchmarks.common import RESULTS, table, write
from fmoe_ext import FMoE, FMoETransformerMLP, ops
from fmoe_ext.gates import UniformGate
from fmoe_ext.pipeline import Pipeline, init_groups, split
from fmoe_ext.testing import DistributedPool

RANKS, LAYERS, D, SEQ = 2, 8, 128, 64


class Rows(nn.Module):
    """A layer that takes seconds_per_row in the forward and twice that in the backward, and no processor."""

    def __init__(self, seconds_per_row):
        super().__init__()
        self.sleep = SleepingExpert(D, seconds_per_row)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.sleep(x) * self.scale


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = FMoETransformerMLP(4, D, 2 * D, top_k=2, gate="softmax")

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def squares(output, _):
    return output.pow(2).sum()


def seconds_of(step):
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def interleaved(steps, rounds):
    """{name: seconds of each round}, after one round that is not counted."""
    seconds = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            taken = seconds_of(step)
            if turn:
                seconds[name].append(taken)
    return seconds


def measure_schedules(chunks, rounds, seconds_per_row):
    torch.manual_seed(0)
    make = partial(Rows, seconds_per_row) if seconds_per_row else Block
    model = nn.Sequential(*(make() for _ in range(LAYERS)))
    x = torch.randn(4 * chunks, SEQ, D)
    groups = init_groups(RANKS)
    parts = split(model, RANKS, x[:4], by=[LAYERS // RANKS] * RANKS)
    options = {"chunks": chunks, "groups": groups, "count": len}
    ours = {
        name: Pipeline(parts, squares, schedule=name, **options) for name in ("gpipe", "1f1b", "zero_bubble")
    }

    def one_process():
        if dist.get_rank() == 0:
            for part in x.split(4):
                squares(model(part), None).backward()

    steps = {"one process": one_process, "torch 1f1b": torch_alone(model, x, chunks)}
    steps |= {f"fmoe_ext {name}": lambda p=p: p.train_step(x, x) for name, p in ours.items()}
    return interleaved(steps, rounds)


def torch_alone(model, x, chunks):
    rank, size = dist.get_rank(), LAYERS // RANKS
    stage = PipelineStage(
        nn.Sequential(*model[rank * size : (rank + 1) * size]), rank, RANKS, torch.device("cpu")
    )
    schedule = Schedule1F1B(stage, chunks, loss_fn=squares, scale_grads=False)

    def step():
        schedule.step(
            *((x,) if rank == 0 else ()), target=x if rank == RANKS - 1 else None, return_outputs=False
        )

    return step


def lines_of_schedules(chunks, seconds, layers):
    ideal = (chunks + RANKS - 1) / chunks / RANKS
    whole = seconds["one process"]
    records = []
    for name, values in seconds.items():
        ratio = statistics.median(ideal * w / v for w, v in zip(whole, values, strict=True))
        records.append(
            {
                "layers": layers,
                "chunks": chunks,
                "step": name,
                "median ms": round(1e3 * statistics.median(values), 1),
                "of the ideal": "" if name == "one process" else f"{ratio:.2f}",
            }
        )
    return records


class Clock:
    """Time that nothing but computations and messages take: load on the machine does not change it."""

    now = 0.0


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += 2 * ctx.seconds
        return grad, None, None


class Computation(nn.Module):
    """Takes seconds on the clock in the forward, and twice that in the backward."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return Spend.apply(x, self.clock, self.seconds) * self.scale


class Network:
    """all_to_all_single whose messages take their time on the clock, one after the other."""

    def __init__(self, clock):
        self.clock, self.seconds_of_message, self.free_at = clock, 0.0, 0.0
        self.plain = dist.all_to_all_single

    def __call__(self, output, input, output_splits=None, input_splits=None, group=None, async_op=False):
        work = self.plain(output, input, output_splits, input_splits, group, async_op=True)
        is_tokens = input[:1].numel() == D  # counts and weights are nothing beside them
        self.free_at = max(self.free_at, self.clock.now) + self.seconds_of_message * is_tokens
        work = Message(work, self.free_at, self.clock)
        return work if async_op else work.wait()


class Message:
    def __init__(self, work, done_at, clock):
        self.work, self.done_at, self.clock = work, done_at, clock

    def wait(self):
        self.work.wait()
        self.clock.now = max(self.clock.now, self.done_at)


def measure_overlap(chunks, checkpoint, message):
    """{name: seconds on the clock of a step}; attention and experts take 1 each, a message `message`."""
    clock, groups, rows = Clock(), init_groups(1), 4
    network = dist.all_to_all_single = Network(clock)
    layers = []
    for _ in range(8):
        moe = FMoE(
            *(1, D, 1, None, None, groups.ep, 1, UniformGate), expert=lambda _: Computation(clock, 1.0)
        )
        layers += [Computation(clock, 1.0), moe]
    model, x = nn.Sequential(*layers), torch.randn(rows * chunks, D)
    seconds = {}
    cases = {"compute alone": (False, 0.0), "no overlap": (False, message), "overlap": (True, message)}
    for name, (overlap, each) in cases.items():
        parts = split(model, 2, x[:rows], by=[8, 8])
        pipeline = Pipeline(
            *(parts, squares),
            schedule="dualpipe_v",
            chunks=chunks,
            groups=groups,
            count=len,
            checkpoint=checkpoint,
            overlap=overlap,
        )
        network.seconds_of_message, network.free_at, clock.now = each, 0.0, 0.0
        pipeline.train_step(x, x)
        seconds[name] = clock.now
    dist.all_to_all_single = network.plain
    return seconds


def lines_of_overlap(chunks, checkpoint, message, seconds):
    alone, plain, overlapped = seconds.values()
    return [
        {
            "chunks": chunks,
            "checkpoint": checkpoint,
            "message / computation": message,
            **{name: round(value, 2) for name, value in seconds.items()},
            "hidden": f"{(plain - overlapped) / (plain - alone):.0%}",
        }
    ]


def measure_backward(rounds, dtype, T=2048, K=2, E=8, width=512, hidden=1024):
    """Seconds of each round: the whole backward, its inputs' part, its weights' part."""
    torch.manual_seed(0)
    x = torch.randn(T, width, dtype=dtype, requires_grad=True)
    w1 = (torch.randn(E, 2 * hidden, width) * 0.02).to(dtype).requires_grad_()
    w2 = (torch.randn(E, width, hidden) * 0.02).to(dtype).requires_grad_()
    weights = torch.rand(T, K, dtype=dtype, requires_grad=True)
    order = ops.sort_tokens(torch.rand(T, E).topk(K).indices, E)
    grad = torch.randn(T, width, dtype=dtype)
    seconds = {"whole": [], "inputs": [], "weights": []}

    def timed(name, wanted, keep):
        begin = time.perf_counter()
        torch.autograd.grad(y, wanted, grad, retain_graph=keep)
        seconds[name].append(time.perf_counter() - begin)

    for _ in range(rounds + 1):
        y = ops.expert_mlp(x, order.row_idx, order.inverse, order.offs, w1, None, w2, None, weights, "swiglu")
        timed("whole", (x, weights, w1, w2), True)
        timed("inputs", (x, weights), True)
        timed("weights", (w1, w2), False)
    return {name: values[1:] for name, values in seconds.items()}


def lines_of_backward(dtype, seconds):
    rounds = zip(seconds["inputs"], seconds["weights"], seconds["whole"], strict=True)
    ratio = statistics.median((a + b) / c for a, b, c in rounds)
    record = {name: f"{1e3 * statistics.median(values):.1f} ms" for name, values in seconds.items()}
    return [{"dtype": str(dtype).removeprefix("torch."), **record, "parts / whole": f"{ratio:.2f}"}]


def run(args):
    """{name of a table: records}."""
    found = {}
    if args.only in (None, "backward"):
        found["backward"] = [
            record
            for dtype in (torch.float32, torch.bfloat16)
            for record in lines_of_backward(dtype, measure_backward(3 * args.rounds, dtype))
        ]
    with DistributedPool(RANKS) as pool:
        if args.only in (None, "schedules"):
            found["schedules"] = []
            for layers, seconds_per_row in (("sleep", args.sleep / 4), ("compute", 0.0)):
                for chunks in args.chunks:
                    seconds = pool.run(measure_schedules, chunks, args.rounds, seconds_per_row, timeout=600)[
                        0
                    ]
                    found["schedules"] += lines_of_schedules(chunks, seconds, layers)
        if args.only in (None, "overlap"):
            found["overlap"] = []
            for chunks, checkpoint, message in product((4, 10), (False, True), (0.5,)):
                seconds = pool.run(measure_overlap, chunks, checkpoint, message, world_size=1)[0]
                found["overlap"] += lines_of_overlap(chunks, checkpoint, message, seconds)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of a layer or message that sleeps")
    parser.add_argument("--only", choices=("schedules", "overlap", "backward"))
    args = parser.parse_args()
    found = run(args)
    texts = [
        f"{name}\n\n{table(list(records[0]), [list(record.values()) for record in records])}"
        for name, records in found.items()
    ]
    print("\n\n".join(texts))
    command = " ".join(["python -m benchmarks.bench_pipeline", *sys.argv[1:]])
    name = "pipeline" if args.only is None else f"pipeline_{args.only}"
    write(
        RESULTS / f"{name}.json",
        command,
        [record for records in found.values() for record in records],
        "\n\n".join(texts),
    )


if __name__ == "__main__":
    main()
