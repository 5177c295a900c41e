"""Expert parallelism on gloo processes: compute alone, exchange alone, the layer with and without overlap, and a
straightforward layer on all_to_all_single.

    python -m benchmarks.bench_ep [--ranks 2 4] [--wire-gbps 0 0.5] [--tokens 1024] [--sleep 0.05]

All processes share this machine, and what gloo copies takes a core away from the experts. --wire-gbps adds, to the
real exchange, the time that a network of that speed would need, in which the processor is free, as with a real network.
Other load on the machine makes these figures wrong. What does not depend on it is the schedule: in the last table,
experts and network sleep (--sleep seconds a message), so that nothing competes for a processor.

exchange=choice and exchange=token are layers whose gate chooses by the token (SoftmaxGate), so that a token's experts
are on any ranks; the other layers deal tokens out in turn. "bytes / minimum" is against the rows of that form alone: a
row and a weight there, a row back, and their gradients.

"exchange hidden" is (A - B) / (A - C), where A is the time without overlap, B with it, and C that of compute alone; all
are the shortest of the rounds, because other load only adds.
"""

import argparse
import functools
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

from benchmarks.common import RESULTS, table, write
from fmoe_ext import FMoE, FMoETransformerMLP
from fmoe_ext.ep.exchange import global_exchange
from fmoe_ext.ep.process_groups import register_group
from fmoe_ext.ep.tuning import NUM_STEPS
from fmoe_ext.gates import SoftmaxGate, UniformGate
from fmoe_ext.testing import DistributedPool


class Wire:
    """Counts what all_to_all_single sends to other ranks and nodes, and lets the latter take the time of a network."""

    def __init__(self, gbps, ranks_per_node=1):
        self.seconds_per_byte = 8e-9 / gbps if gbps else 0.0
        self.ranks_per_node = ranks_per_node
        self.bytes_sent = self.bytes_between_nodes = 0
        self.free_at = 0.0
        self.plain = dist.all_to_all_single

    def __call__(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        each = input_split_sizes or [input.shape[0] // len(ranks)] * len(ranks)
        row_bytes = input[:1].numel() * input.element_size() if input.shape[0] else 0
        sent = {rank: rows * row_bytes for rank, rows in zip(ranks, each, strict=True)}
        between = [n for rank, n in sent.items() if rank // self.ranks_per_node != own // self.ranks_per_node]
        self.bytes_sent += sum(sent.values()) - sent[own]
        self.bytes_between_nodes += sum(between)
        self.free_at = max(self.free_at, time.perf_counter()) + sum(between) * self.seconds_per_byte
        work = Transfer(
            self.plain(output, input, output_split_sizes, input_split_sizes, group, async_op=True),
            self.free_at,
        )
        return work if async_op else work.wait()


class Transfer:
    def __init__(self, work, done_at):
        self.work, self.done_at = work, done_at

    def wait(self):
        self.work.wait()
        time.sleep(max(0.0, self.done_at - time.perf_counter()))


def straightforward(layer, x):
    """The obvious program: sort, exchange, sort by expert, loop over experts, and back."""
    size, e, K = layer.world_size, layer.num_local_experts, layer.top_k
    w1, _, w2, _ = layer.experts.weights
    topk_idx, topk_weights = layer.gate(x)
    order = topk_idx.flatten().argsort(stable=True)
    counts = torch.bincount(topk_idx.flatten(), minlength=size * e)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    sends = counts.view(size, e).sum(1).tolist()
    receives = received.view(size, e).sum(1).tolist()
    rows = x[order // K]
    arrived = all_to_all_single(rows.new_empty(sum(receives), x.shape[1]), rows, receives, sends)
    expert = torch.arange(e).repeat(size).repeat_interleave(received)
    by_expert = expert.argsort(stable=True)
    parts = arrived[by_expert].split(torch.bincount(expert, minlength=e).tolist())
    results = torch.cat(
        [F.linear(F.gelu(F.linear(part, a)), b) for part, a, b in zip(parts, w1, w2, strict=True)]
    )
    results = torch.empty_like(results).index_copy(0, by_expert, results)
    back = all_to_all_single(torch.empty_like(rows), results, sends, receives)
    weighted = back * topk_weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // K, weighted)


class SleepingExpert(nn.Module):
    """Takes seconds_per_row in the forward and twice that in the backward, and no processor."""

    def __init__(self, d_model, seconds_per_row):
        super().__init__()
        self.seconds_per_row = seconds_per_row

    def forward(self, x):
        return _Sleep.apply(x, self.seconds_per_row)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds_per_row):
        ctx.seconds = len(x) * seconds_per_row
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


def minimum_bytes(layer, x):
    """Bytes that this rank sends in a forward and backward: its own rows there, those of others back, gradients."""
    rank_of = layer.gate(x)[0] // layer.num_local_experts
    of_rank = [rank_of == rank for rank in range(layer.world_size)]
    choices = torch.stack([mine.sum() for mine in of_rank])
    tokens = torch.stack([mine.any(1).sum() for mine in of_rank])
    rows = tokens if layer.expert_parallel.exchange == "token" else choices
    away = (
        torch.stack([rows * 2 * x.shape[1], choices]) * x.element_size()
    )  # a row there, a gradient there; a weight
    away[:, layer.ep_rank] = 0
    back = torch.empty_like(away.T)
    dist.all_to_all_single(back, away.T.contiguous())
    return int(away.sum() + back.sum())


def measure(args, gbps, seconds_per_row=0.0):
    """{name: seconds of each round}, {name: bytes sent in a round}, {name: the least of that form, where it differs}.

    With seconds_per_row, of experts that sleep.
    """
    torch.manual_seed(dist.get_rank())
    size = dist.get_world_size()
    wire = dist.all_to_all_single = Wire(gbps)
    make = functools.partial(FMoETransformerMLP, args.experts, args.d_model, args.d_hidden, bias=False)
    if seconds_per_row:
        expert = functools.partial(SleepingExpert, seconds_per_row=seconds_per_row)
        make = functools.partial(FMoE, args.experts, args.d_model, expert=expert)
    by_token = functools.partial(make, top_k=args.top_k, gate=SoftmaxGate, world_size=size)
    make = functools.partial(make, top_k=args.top_k, gate=UniformGate)
    local = make()
    exchanges = {f"exchange={name}": by_token(exchange=name) for name in args.exchange}
    layers = {n: make(world_size=size, overlap_degree=n) for n in (1, 2, 4, "auto")}
    x = torch.randn(args.tokens, args.d_model, requires_grad=True)
    rows = torch.randn(args.tokens * args.top_k, args.d_model, requires_grad=True)
    splits = [len(rows) // size] * size
    group = register_group()

    def exchange():
        there = global_exchange(rows, splits, splits, group)
        return global_exchange(there, splits, splits, group)

    steps = {"compute alone": lambda: local(x), "exchange alone": exchange}
    if not seconds_per_row:
        steps["straightforward"] = lambda: straightforward(layers[1], x)
    steps |= {f"overlap_degree={n}": lambda layer=layer: layer(x) for n, layer in layers.items()}
    steps |= {name: lambda layer=layer: layer(x) for name, layer in exchanges.items()}
    if "auto" in layers:
        for _ in range(NUM_STEPS + 1):
            layers["auto"](x)
    least = {name: minimum_bytes(layer, x) for name, layer in exchanges.items()}
    seconds, sent = {name: [] for name in steps}, {}
    for turn in range(args.rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            before, wire.bytes_sent = time.perf_counter(), 0
            step().sum().backward()
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - before)
            sent[name] = wire.bytes_sent
    dist.all_to_all_single = wire.plain
    return seconds, sent, least


def summarize(args, ranks, network, seconds, sent, least_of):
    best = {name: min(values) for name, values in seconds.items()}
    compute, plain = best["compute alone"], best["overlap_degree=1"]
    moved = args.tokens * args.top_k * (ranks - 1) // ranks
    # rows there and back in the forward and in the backward; a weight with each row there, its gradient back
    least = moved * (4 * args.d_model * 4 + 2 * 4)
    records = []
    for name, values in seconds.items():
        hidden = None
        if name.startswith("overlap") and name != "overlap_degree=1" and plain > compute:
            hidden = (plain - best[name]) / (plain - compute)
        records.append(
            {
                "ranks": ranks,
                "network": network,
                "name": name,
                "median": statistics.median(values),
                "min": best[name],
                "hidden": hidden,
                "bytes": sent[name],
                "minimum_bytes": least_of.get(name, least),
            }
        )
    return records


def lines_of(records):
    compute = records[0]["min"]
    return [
        [
            record["name"],
            f"{record['median'] * 1e3:.1f}",
            f"{record['min'] * 1e3:.1f}",
            f"{record['min'] / compute:.2f}",
            "" if record["hidden"] is None else f"{record['hidden']:.0%}",
            f"{record['bytes'] / 2**20:.2f}",
            f"{record['bytes'] / record['minimum_bytes']:.4f}",
        ]
        for record in records
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wire-gbps", type=float, nargs="+", default=[0.0, 0.5], help="0: none added")
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=4, help="of each rank")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--exchange", nargs="*", default=["choice", "token"])
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds of a message, where all sleep")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    header = [
        "forward + backward",
        "median ms",
        "min ms",
        "min / compute",
        "exchange hidden",
        "MiB sent",
        "bytes / minimum",
    ]
    records, texts = [], []
    cases = [(gbps, 0.0, f"a network of {gbps:g} Gb/s added" if gbps else "gloo") for gbps in args.wire_gbps]
    with DistributedPool(max(args.ranks)) as pool:
        for ranks in args.ranks:
            # experts' forward: twice a message of rows, so that compute is half as long again as the exchange
            message = args.tokens * args.top_k * (ranks - 1) // ranks * args.d_model * 4
            gbps = 8e-9 * message / args.sleep
            asleep = (gbps, 2 * args.sleep / (args.tokens * args.top_k), "experts and network that sleep")
            for gbps, seconds_per_row, network in [*cases, asleep]:
                measured = pool.run(measure, args, gbps, seconds_per_row, world_size=ranks, timeout=600)[0]
                found = summarize(args, ranks, network, *measured)
                texts.append(f"{ranks} ranks, {network}\n\n{table(header, lines_of(found))}")
                print(texts[-1], end="\n\n", flush=True)
                records += found
    command = " ".join(["python -m benchmarks.bench_ep", *sys.argv[1:]])
    write(RESULTS / "ep.json", command, records, "\n\n".join(texts))


if __name__ == "__main__":
    main()
