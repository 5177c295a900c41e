"""Cost of a pipeline: schedules against their bubble formula, exchanges hidden by overlap, backward in two parts.

    python -m benchmarks.bench_pipeline [--rounds 5] [--only schedules|overlap|backward]

schedules: a step on 2 gloo processes, of this package and of torch.distributed.pipelining alone. "stages apart": every
process computes the microbatches of its own stage, side by side and without messages, which is as fast as this machine
lets p processes be; "one process" computes all of them. "of the ideal" is (m + p - 1) / m of the time of the stages
apart over the measured time; "of p cores" the same with a p-th of one process's time, as if cores shared no memory.
Layers compute, and layers that sleep, which other load on the machine does not slow down.
overlap: dualpipe_v; attention and experts take 1 each in the forward and 2 in the backward, a message half of that or
as much. "clock": on a rank that stands for many alike, in units of a clock of its own, which other load on the machine
does not change. "gloo": on 2 processes whose computations and network sleep (--sleep seconds for 1), in seconds.
"hidden" is (A - B) / (A - C): A without overlap, B with it, C without a network. "bound" is what the schedule allows:
of 2m forwards and 2m backwards of m chunks in two stages, three each come before the first pair or after the last, so
(2m - 3) / 2m. gloo's own milliseconds, which C has too, are hidden besides.
backward: expert_mlp's whole backward, and that of its inputs and then of its weights, in one thread's processor time.
Rounds are interleaved; figures are medians, ratios the medians of the rounds' ratios; "of the shortest" is the ratio of
the shortest times, since other load only adds.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from benchmarks.bench_ep import SleepingExpert
from benchmarks.common import RESULTS, table, write
from fmoe_ext import FMoE, FMoETransformerMLP, ops
from fmoe_ext.gates import UniformGate
from fmoe_ext.pipeline import Pipeline, init_groups, split
from fmoe_ext.planning.layouts import SCHEDULE_COSTS
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

    def accumulate(layers):
        for part in x.split(4):
            squares(layers(part.detach().requires_grad_()), None).backward()

    def one_process():
        if dist.get_rank() == 0:
            accumulate(model)

    steps = {"one process": one_process, "stages apart": partial(accumulate, own_layers(model))}
    steps["torch 1f1b"] = torch_alone(Schedule1F1B, model, x, chunks)
    steps["torch zero_bubble"] = torch_alone(ScheduleInterleavedZeroBubble, model, x, chunks)
    steps |= {f"fmoe_ext {name}": lambda p=p: p.train_step(x, x) for name, p in ours.items()}
    return interleaved(steps, rounds)


def own_layers(model):
    first = dist.get_rank() * LAYERS // RANKS
    return nn.Sequential(*model[first : first + LAYERS // RANKS])


def torch_alone(schedule_class, model, x, chunks):
    rank = dist.get_rank()
    stage = PipelineStage(own_layers(model), rank, RANKS, torch.device("cpu"))
    takes_list = schedule_class is not Schedule1F1B
    schedule = schedule_class([stage] if takes_list else stage, chunks, loss_fn=squares, scale_grads=False)

    def step():
        schedule.step(
            *((x,) if rank == 0 else ()), target=x if rank == RANKS - 1 else None, return_outputs=False
        )

    return step


def lines_of_schedules(chunks, seconds, layers):
    bubbles = (chunks + RANKS - 1) / chunks

    def share(values, ideals):
        return f"{statistics.median(bubbles * i / v for i, v in zip(ideals, values, strict=True)):.2f}"

    return [
        {
            "layers": layers,
            "chunks": chunks,
            "step": name,
            "median ms": round(1e3 * statistics.median(values), 1),
            "of the ideal": share(values, seconds["stages apart"]),
            "of p cores": share(values, [whole / RANKS for whole in seconds["one process"]]),
        }
        for name, values in seconds.items()
    ]


class Clock:
    """Time that nothing but computations and messages take: load on the machine does not change it."""

    now = 0.0

    def spend(self, seconds):
        self.now += seconds

    def wait_until(self, moment):
        self.now = max(self.now, moment)


class WallClock:
    """Wall time: computations and messages sleep."""

    @property
    def now(self):
        return time.perf_counter()

    def spend(self, seconds):
        time.sleep(seconds)

    def wait_until(self, moment):
        time.sleep(max(0.0, moment - self.now))


class Spend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock.spend(seconds)
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors  # noqa: B018  # computed again under checkpointing
        ctx.clock.spend(2 * ctx.seconds)
        return grad, None, None


class Computation(nn.Module):
    """Takes seconds on the clock in the forward, and twice that in the backward."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return Spend.apply(x * self.scale, self.clock, self.seconds)


class Network:
    """all_to_all_single whose messages take their time on the clock, one after the other."""

    def __init__(self, clock):
        self.clock, self.seconds_of_message, self.free_at = clock, 0.0, 0.0
        self.plain = dist.all_to_all_single

    def __call__(self, output, input, output_splits=None, input_splits=None, group=None, async_op=False):
        work = self.plain(output, input, output_splits, input_splits, group, async_op=True)
        is_tokens = input.shape[1:].numel() == D  # counts and weights are nothing beside them
        self.free_at = max(self.free_at, self.clock.now) + self.seconds_of_message * is_tokens
        work = Message(work, self.free_at, self.clock)
        return work if async_op else work.wait()


class Message:
    def __init__(self, work, done_at, clock):
        self.work, self.done_at, self.clock = work, done_at, clock

    def wait(self):
        self.work.wait()
        self.clock.wait_until(self.done_at)


def measure_overlap(chunks, checkpoint, message, unit=None):
    """{name: time of a step}; attention and experts take 1 each, a message `message`.

    unit: the seconds of the wall that 1 is; None for a clock of its own.
    """
    clock, unit = (Clock(), 1.0) if unit is None else (WallClock(), unit)
    ranks, rows = dist.get_world_size(), 4
    groups = init_groups(1, ranks)
    network = dist.all_to_all_single = Network(clock)
    layers = []
    for _ in range(8):
        moe = FMoE(
            1, D, ranks, None, None, groups.ep, 1, UniformGate, expert=lambda _: Computation(clock, unit)
        )
        moe.mark_parallel_comm("moe")
        layers += [Computation(clock, unit), moe]
    model, x = nn.Sequential(*layers), torch.randn(rows * chunks, D)
    seconds = {}
    cases = {"compute alone": (False, 0.0), "no overlap": (False, message), "overlap": (True, message)}
    for name, (overlap, each) in [
        ("compute alone", (False, 0.0)),
        *cases.items(),
    ]:  # the first time does not count
        parts = split(model, 2, x[:rows], by=[8, 8])
        pipeline = Pipeline(
            parts,
            squares,
            schedule="dualpipe_v",
            chunks=chunks,
            groups=groups,
            count=len,
            checkpoint=checkpoint,
            overlap=overlap,
        )
        network.seconds_of_message, network.free_at = each * unit, 0.0
        dist.barrier()
        begin = clock.now
        pipeline.train_step(x, x)
        seconds[name] = clock.now - begin
    dist.all_to_all_single = network.plain
    return seconds


def lines_of_overlap(where, chunks, checkpoint, message, seconds):
    alone, plain, overlapped = seconds.values()
    return [
        {
            "on": where,
            "chunks": chunks,
            "checkpoint": checkpoint,
            "message / computation": message,
            **{name: round(value, 2) for name, value in seconds.items()},
            "hidden": f"{(plain - overlapped) / (plain - alone):.1%}",
            "bound": f"{SCHEDULE_COSTS['dualpipe_v'].in_pairs(1, chunks):.1%}",
        }
    ]


def measure_backward(rounds, dtype, T=2048, K=2, E=8, width=512, hidden=1024):
    """Processor seconds of each round: the whole backward, its inputs' part, its weights' part."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(T, width, dtype=dtype, requires_grad=True)
    w1 = (torch.randn(E, 2 * hidden, width) * 0.02).to(dtype).requires_grad_()
    w2 = (torch.randn(E, width, hidden) * 0.02).to(dtype).requires_grad_()
    weights = torch.rand(T, K, dtype=dtype, requires_grad=True)
    order = ops.sort_tokens(torch.rand(T, E).topk(K).indices, E)
    grad = torch.randn(T, width, dtype=dtype)
    seconds = {"whole": [], "inputs": [], "weights": []}

    def timed(name, wanted, keep):
        begin = time.process_time()
        torch.autograd.grad(y, wanted, grad, retain_graph=keep)
        seconds[name].append(time.process_time() - begin)

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
    shortest = (min(seconds["inputs"]) + min(seconds["weights"])) / min(seconds["whole"])
    ratios = {"parts / whole": f"{ratio:.2f}", "of the shortest": f"{shortest:.2f}"}
    return [{"dtype": str(dtype).removeprefix("torch."), **record, **ratios}]


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
            on_clock, on_gloo = (
                product((4, 10), (False, True), (0.5, 1.0)),
                product((4, 10), (False, True), (0.5,)),
            )
            for where, ranks, unit, cases in (
                ("clock", 1, None, on_clock),
                ("gloo", RANKS, args.sleep, on_gloo),
            ):
                for case in cases:
                    seconds = pool.run(measure_overlap, *case, unit, world_size=ranks, timeout=600)[0]
                    found["overlap"] += lines_of_overlap(where, *case, seconds)
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
