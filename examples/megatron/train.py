"""Train a small GPT of Megatron-core, fmoefied, on real text; on the CPU, compare two processes with one.

    python examples/megatron/train.py                              1 process, then 2 with half of the experts each
    torchrun --nproc-per-node 8 examples/megatron/train.py --device cuda --ep 8 --steps 1000

Under torchrun it only trains, in the layout that --ep, --tp and --pp ask for.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lm"))
from data import DataError, load_corpus
from gpt import forward_backward, make_chunks, make_config
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from on_cpu import megatron_on_cpu

from fmoe_ext.megatron import fmoefy

TOLERANCE = {"float32": 1e-4, "float64": 1e-7}  # of losses, between layouts; Megatron clips by a float32 norm


def build_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--dtype",
        choices=("auto", "float32", "float64"),
        default="auto",
        help="auto: float64 to compare, float32 under torchrun. In float32 a token whose two best experts are nearly "
        "equal may choose another one in another layout",
    )
    add("--data", help="text file or folder; none: Python's standard library")
    add("--out", default="out/megatron", help="folder for metrics-<processes>.jsonl")
    add("--steps", type=int, default=30)
    add("--batch-size", type=int, default=16, help="windows in a step, all processes together")
    add("--microbatches", type=int, default=2, help="parts that each process computes one after the other")
    add("--seq-len", type=int, default=64)
    add("--d-model", type=int, default=64)
    add("--num-layers", type=int, default=2)
    add("--num-experts", type=int, default=8, help="in all")
    add("--top-k", type=int, default=2)
    add("--balance-weight", type=float, default=0.01, help="Megatron's moe_aux_loss_coeff")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    add("--ep", type=int, default=1, help="processes that share the experts (under torchrun)")
    add("--tp", type=int, default=1, help="tensor-parallel processes (under torchrun)")
    add("--pp", type=int, default=1, help="pipeline stages (under torchrun)")
    return parser


def parse(arguments=None):
    """The options; what cannot be ends here, before any process starts."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in (
        "steps",
        "batch_size",
        "microbatches",
        "seq_len",
        "d_model",
        "num_layers",
        "num_experts",
        "top_k",
    ):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, but is {getattr(options, name)}")
    if not dist.is_torchelastic_launched():
        if options.device == "cuda":
            parser.error("--device cuda: start it with torchrun, one process for each GPU")
        if given := [name for name in ("ep", "tp", "pp") if getattr(options, name) != 1]:
            parser.error(f"--{given[0]} is for torchrun: without it, 1 process is compared with 2 of --ep 2")
    if options.dtype == "auto":
        options.dtype = "float32" if dist.is_torchelastic_launched() else "float64"
    try:
        load_corpus(options.data, options.seq_len)
    except DataError as error:
        parser.error(str(error))
    return options


def make_training(options):
    """Megatron's process groups, the model with experts in the place of its MLPs, and its optimizer."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=1,
    )
    if options.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    torch.manual_seed(options.seed)
    config = make_config(
        options.device,
        getattr(torch, options.dtype),
        num_layers=options.num_layers,
        hidden_size=options.d_model,
        ffn_hidden_size=4 * options.d_model,
        num_attention_heads=4,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        moe_aux_loss_coeff=options.balance_weight,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = make_chunks(config, 256, options.seq_len, options.device)
    model = fmoefy(model, num_experts=options.num_experts // options.ep, top_k=options.top_k)
    if dist.get_rank() == 0:
        print(model[0].fmoe_report)
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in model]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=options.lr, clip_grad=1.0, weight_decay=0.01), chunks
    )
    return chunks, optimizer


def train(options):
    """The loss of every step, over the whole batch; written to metrics-<processes>.jsonl by the first process."""
    corpus = load_corpus(options.data, options.seq_len)
    chunks, optimizer = make_training(options)
    data_group = parallel_state.get_data_parallel_group()
    is_first = dist.get_rank() == 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    metrics = (out / f"metrics-{dist.get_world_size()}.jsonl").open("w") if is_first else None
    losses = []
    with metrics or contextlib.nullcontext():
        bar = tqdm(range(1, options.steps + 1), f"{dist.get_world_size()} process(es)", disable=not is_first)
        for step in bar:
            batch = corpus.batch(step, options.batch_size, options.seq_len, options.seed)
            parts = zip(*(part.chunk(options.microbatches) for part in batch), strict=True)
            mine = [
                tuple(x.tensor_split(data_group.size())[data_group.rank()].to(options.device) for x in part)
                for part in parts
            ]
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss = mean_loss(forward_backward(chunks, mine, options.seq_len), options.device)
            _, grad_norm, _ = optimizer.step()
            losses.append(loss)
            if is_first:
                bar.set_postfix(loss=f"{loss:.4f}")
                metrics.write(json.dumps({"step": step, "loss": loss, "grad_norm": float(grad_norm)}) + "\n")
    parallel_state.destroy_model_parallel()
    return losses


def mean_loss(losses, device):
    """Of the microbatches of all processes: only those of the last pipeline stage have some."""
    total = torch.tensor([sum(map(float, losses)), len(losses)], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def run_process(rank, num_processes, options, folder):
    """One of the processes that main() starts on this machine: leaves its losses in the folder."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
    store = f"file://{folder}/store-{num_processes}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_processes)
    options.ep = num_processes
    with megatron_on_cpu():
        losses = train(options)
    if rank == 0:
        Path(folder, f"losses-{num_processes}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def compare(alone, spread, dtype):
    print(f"{'step':>4}  {'1 process':>12}  {'2 processes':>12}  difference")
    for step, (a, b) in enumerate(zip(alone, spread, strict=True), 1):
        if step == 1 or step % 5 == 0 or step == len(alone):
            print(f"{step:4}  {a:12.6f}  {b:12.6f}  {abs(a - b):.1e}")
    largest = max(abs(a - b) for a, b in zip(alone, spread, strict=True))
    if largest > TOLERANCE[dtype]:
        raise SystemExit(f"the losses differ by {largest:.1e}, more than {TOLERANCE[dtype]:g}")
    print(
        f"the losses are equal: the largest difference in {len(alone)} steps is {largest:.1e} ({dtype})\n"
        f"loss {alone[0]:.4f} -> {alone[-1]:.4f}"
    )


def main():
    options = parse()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
        if options.device == "cuda":
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        with megatron_on_cpu() if options.device == "cpu" else contextlib.nullcontext():
            losses = train(options)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        run_process(0, 1, options, folder)
        torch.multiprocessing.spawn(run_process, (2, options, folder), nprocs=2)
        losses = [json.loads(Path(folder, f"losses-{n}.json").read_text()) for n in (1, 2)]
    compare(*losses, options.dtype)


if __name__ == "__main__":
    main()
