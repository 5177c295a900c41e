"""Train a small GPT of Megatron-core with our experts on real text; on the CPU, compare it with Megatron's own.

    python examples/megatron/train.py               Megatron's layers, ours on 1 process, then on 2 with half each
    python examples/megatron/train.py --model dense       a dense GPT, fmoefied: 1 process, then 2
    torchrun --nproc-per-node 8 examples/megatron/train.py --device cuda --ep 8 --steps 1000

A model is described by Megatron's own arguments (models/*.txt). Under torchrun it only trains, in the layout that --ep,
--tp and --pp ask for.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path

import arguments as by_arguments
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

from fmoe_ext.checkpoint import to_megatron_core
from fmoe_ext.megatron import fmoefy, with_experts

# Of losses. Between layouts: Megatron clips by a float32 norm. From Megatron's own layers: scores are float32 there.
TOLERANCE = {"float32": 1e-4, "float64": 1e-7}
TOLERANCE_OF_MEGATRONS = {"float32": 1e-4, "float64": 1e-5}
OF_DENSE = {"d_model": 64, "num_layers": 2, "num_experts": 8, "top_k": 2, "balance_weight": 0.01}
MEGATRONS = "Megatron's own"


def build_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        choices=(*by_arguments.names(), "dense"),
        default="deepseek_v3",
        help="a file of Megatron's arguments in models/, or a dense GPT in which fmoefy replaces the MLPs",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--dtype",
        choices=("auto", "float32", "float64"),
        default="auto",
        help="auto: float64 to compare, float32 under torchrun. In float32 a token whose two best experts are nearly "
        "equal may choose another one in another layout",
    )
    add("--data", help="text file or folder; none: Python's standard library")
    add("--out", default="out/megatron", help="folder for metrics-<run>.jsonl")
    add("--steps", type=int, default=30)
    add("--batch-size", type=int, default=16, help="windows in a step, all processes together")
    add("--microbatches", type=int, default=2, help="parts that each process computes one after the other")
    add("--seq-len", type=int, default=64)
    for name, default in OF_DENSE.items():
        flag = "--" + name.replace("_", "-")
        add(flag, type=type(default), help=f"of --model dense, where it is {default} unless given")
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
    given = [name for name in OF_DENSE if getattr(options, name) is not None]
    if options.model != "dense" and given:
        flag = "--" + given[0].replace("_", "-")
        parser.error(
            f"{flag} is for --model dense: models/{options.model}.txt has Megatron's arguments of this model"
        )
    vars(options).update({name: value for name, value in OF_DENSE.items() if name not in given})
    positive = (
        "steps",
        "batch_size",
        "microbatches",
        "seq_len",
        *(n for n in OF_DENSE if n != "balance_weight"),
    )
    for name in positive:
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be at least 1, but is {getattr(options, name)}")
    if not dist.is_torchelastic_launched():
        if options.device == "cuda":
            parser.error("--device cuda: start it with torchrun, one process for each GPU")
        if given := [name for name in ("ep", "tp", "pp") if getattr(options, name) != 1]:
            parser.error(f"--{given[0]} is for torchrun: without it, 1 process is compared with 2 of --ep 2")
        # Megatron takes the mean of the parts' losses, which is that of the windows only if all have as many
        if options.batch_size % (2 * options.microbatches):
            parser.error(
                f"--batch-size {options.batch_size} must be a multiple of 2 * --microbatches {options.microbatches}: "
                "1 process and 2 compute the same losses only if all parts of a batch have as many windows"
            )
    if options.dtype == "auto":
        options.dtype = "float32" if dist.is_torchelastic_launched() else "float64"
    try:
        load_corpus(options.data, options.seq_len)
    except DataError as error:
        parser.error(str(error))
    return options


def make_training(options, megatrons=False):
    """Megatron's process groups, the model with experts, and its optimizer; with Megatron's own layers if asked to."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        expert_model_parallel_size=options.ep,
        expert_tensor_parallel_size=1,
    )
    if options.device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
    torch.manual_seed(options.seed)
    model = make_dense(options) if options.model == "dense" else make_model(options)
    if megatrons:
        (ours,), (model,) = model, [make_model(options, with_experts=lambda spec: spec)[0]]
        model.load_state_dict(to_megatron_core(ours.state_dict()))
        model = [model]
    config = model[0].config
    chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), chunk) for chunk in model]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=options.lr, clip_grad=1.0, weight_decay=0.01), chunks
    )
    return chunks, optimizer


def config_of(options, **fields):
    return make_config(
        options.device,
        getattr(torch, options.dtype),
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        finalize_model_grads_func=finalize_model_grads,
        **fields,
    )


def make_model(options, with_experts=with_experts):
    """The model that a file of Megatron's arguments describes: its own specification, with our experts."""
    fields, model_options = by_arguments.fields_of(by_arguments.read(options.model))
    config = config_of(
        options, expert_model_parallel_size=options.ep, expert_tensor_parallel_size=1, **fields
    )
    return make_chunks(
        config, 256, options.seq_len, options.device, with_experts=with_experts, **model_options
    )


def make_dense(options):
    """A dense GPT with experts in the place of its MLPs."""
    config = config_of(
        options,
        num_layers=options.num_layers,
        hidden_size=options.d_model,
        ffn_hidden_size=4 * options.d_model,
        num_attention_heads=4,
        moe_aux_loss_coeff=options.balance_weight,
    )
    model = make_chunks(config, 256, options.seq_len, options.device)
    model = fmoefy(model, num_experts=options.num_experts, top_k=options.top_k)
    if dist.get_rank() == 0:
        print(model[0].fmoe_report)
    return model


def train(options, megatrons=False):
    """The loss of every step, over the whole batch; written to metrics-<run>.jsonl by the first process."""
    corpus = load_corpus(options.data, options.seq_len)
    chunks, optimizer = make_training(options, megatrons)
    data_group = parallel_state.get_data_parallel_group()
    is_first = dist.get_rank() == 0
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    run = "megatron" if megatrons else dist.get_world_size()
    metrics = (out / f"metrics-{run}.jsonl").open("w") if is_first else None
    losses = []
    with metrics or contextlib.nullcontext():
        title = MEGATRONS if megatrons else f"{run} process(es)"
        bar = tqdm(range(1, options.steps + 1), title, disable=not is_first)
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


def run_process(rank, num_processes, options, folder, megatrons=False):
    """One of the processes that main() starts on this machine: leaves its losses in the folder."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
    run = "megatron" if megatrons else str(num_processes)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{run}", rank=rank, world_size=num_processes
    )
    options.ep = num_processes
    with megatron_on_cpu():
        losses = train(options, megatrons)
    if rank == 0:
        Path(folder, f"losses-{run}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def compare(runs, dtype):
    """Print the losses of all runs beside each other; ends with an error where they differ."""
    names, rows = list(runs), list(zip(*runs.values(), strict=True))
    print("step  " + "  ".join(f"{name:>14}" for name in names))
    for step, losses in enumerate(rows, 1):
        if step == 1 or step % 5 == 0 or step == len(rows):
            print(f"{step:4}  " + "  ".join(f"{loss:14.6f}" for loss in losses))
    for one, other in itertools.pairwise(names):
        largest = max(abs(a - b) for a, b in zip(runs[one], runs[other], strict=True))
        tolerance = TOLERANCE_OF_MEGATRONS if one == MEGATRONS else TOLERANCE
        if largest > tolerance[dtype]:
            raise SystemExit(
                f"the losses of {one} and {other} differ by {largest:.1e}, more than {tolerance[dtype]:g}"
            )
        print(f"{one} and {other}: the losses are equal, the largest difference is {largest:.1e} ({dtype})")
    print(f"loss {rows[0][-1]:.4f} -> {rows[-1][-1]:.4f}")


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
    runs = {"1 process": "1", "2 processes": "2"}
    with tempfile.TemporaryDirectory() as folder:
        if options.model != "dense":
            runs = {MEGATRONS: "megatron"} | runs
            run_process(0, 1, options, folder, megatrons=True)
        run_process(0, 1, options, folder)
        torch.multiprocessing.spawn(run_process, (2, options, folder), nprocs=2)
        losses = {
            name: json.loads(Path(folder, f"losses-{run}.json").read_text()) for name, run in runs.items()
        }
    compare(losses, options.dtype)


if __name__ == "__main__":
    main()
