"""Expert parallelism on gloo processes: compute alone, exchange alone, the layer with and without overlap, and a
straightforward layer on all_to_all_single.

    python -m benchmarks.bench_ep [--ranks 2] [--tokens 1024] [--wire-gbps 1]

All processes share this machine, and what gloo copies takes a core away from the experts. --wire-gbps adds, to the
real exchange, the time that a network of that speed would need, in which the processor is free, as with a real network.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_to_all_single

from benchmarks.common import RESULTS, table, write
from fmoe_ext import FMoETransformerMLP
from fmoe_ext.ep.exchange import global_exchange, register_group
from fmoe_ext.gates import UniformGate
from fmoe_ext.testing import DistributedPool


class Wire:
    """Counts what all_to_all_single sends to other ranks, and lets it take the time of a network."""

    def __init__(self, gbps):
        self.seconds_per_byte = 8e-9 / gbps if gbps else 0.0
        self.bytes_sent = 0
        self.free_at = 0.0
        self.plain = dist.all_to_all_single

    def __call__(
        self, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        away = input.shape[0] - (
            input.shape[0] // size if input_split_sizes is None else input_split_sizes[rank]
        )
        num_bytes = away * input[:1].numel() * input.element_size() if input.shape[0] else 0
        self.bytes_sent += num_bytes
        self.free_at = max(self.free_at, time.perf_counter()) + num_bytes * self.seconds_per_byte
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
    """What one writes first: sort, exchange, sort by expert, loop over experts, and back."""
    size, e, K = layer.world_size, layer.num_expert, layer.top_k
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


def measure(args):
    torch.manual_seed(dist.get_rank())
    size = dist.get_world_size()
    wire = dist.all_to_all_single = Wire(args.wire_gbps)
    shape = dict(num_expert=args.experts, d_model=args.d_model, d_hidden=args.d_hidden, top_k=args.top_k)
    shape |= dict(gate=UniformGate, bias=False)
    local = FMoETransformerMLP(**shape)
    layers = {n: FMoETransformerMLP(world_size=size, overlap_degree=n, **shape) for n in args.overlap}
    x = torch.randn(args.tokens, args.d_model, requires_grad=True)
    rows = torch.randn(args.tokens * args.top_k, args.d_model, requires_grad=True)
    splits = [len(rows) // size] * size
    group = register_group()

    def exchange():
        there = global_exchange(rows, splits, splits, group)
        return global_exchange(there, splits, splits, group)

    steps = {"compute alone": lambda: local(x), "exchange alone": exchange}
    steps["straightforward"] = lambda: straightforward(layers[1], x)
    steps |= {f"overlap_degree={n}": lambda layer=layer: layer(x) for n, layer in layers.items()}
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
    return seconds, sent


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="of each rank")
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=4, help="of each rank")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--overlap", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--wire-gbps", type=float, default=0.0, help="0: none added")
    args = parser.parse_args()

    with DistributedPool(args.ranks) as pool:
        seconds, sent = pool.run(measure, args, timeout=600)[0]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = {name: min(values) for name, values in seconds.items()}  # for what is hidden: other load only adds
    compute, plain = best["compute alone"], best["overlap_degree=1"]
    moved = args.tokens * args.top_k * (args.ranks - 1) // args.ranks
    # rows there and back in the forward and in the backward; a weight with each row there, its gradient back
    least = moved * (4 * args.d_model * 4 + 2 * 4)
    records, lines = [], []
    for name, value in median.items():
        hidden = None
        if name.startswith("overlap") and plain > compute:
            hidden = min(1.0, (plain - best[name]) / (plain - compute))
        record = {
            "name": name,
            "median": value,
            "min": best[name],
            "bytes": sent[name],
            "hidden": hidden,
        }
        records.append(record)
        lines.append(
            [
                name,
                f"{value * 1e3:.1f}",
                f"{best[name] * 1e3:.1f}",
                f"{best[name] / compute:.2f}",
                "" if hidden is None else f"{hidden:.0%}",
                f"{sent[name] / least:.4f}",
            ]
        )
    text = table(
        ["forward + backward", "median ms", "min ms", "min / compute", "exchange hidden", "bytes / minimum"],
        lines,
    )
    command = "python -m benchmarks.bench_ep " + " ".join(sys.argv[1:])
    print(text)
    wire = f"-{args.wire_gbps:g}gbps" if args.wire_gbps else ""
    write(RESULTS / f"ep-{args.ranks}ranks{wire}.json", command.strip(), records, text)


if __name__ == "__main__":
    main()
