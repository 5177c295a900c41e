"""Train the language model with its experts spread over processes, and compare the loss with that of one process.

    python examples/lm/train_ep.py                                    4 processes on this machine (gloo)
    torchrun --nproc-per-node 8 examples/lm/train_ep.py --device cuda     one process for each GPU (NCCL)

Every process takes its share of the windows of a batch and holds its share of the experts.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import load_corpus
from model import LanguageModel, ModelConfig

from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_


def build_parser():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes to start here, unless torchrun starts them")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float64", "float32"), default="float64", help="of parameters and arithmetic")
    add("--data", help="text file or folder; none: Python's standard library")
    add("--steps", type=int, default=40)
    add("--batch-size", type=int, default=8, help="windows in a batch, all ranks together")
    add("--seq-len", type=int, default=64)
    add("--num-experts", type=int, default=8)
    add("--gate", default="softmax", help="one whose choices do not depend on random numbers")
    add("--overlap-degree", type=int, default=2, help="parts in which the exchange overlaps with the experts")
    add("--seed", type=int, default=0)
    return parser


def make_model(options, ep_size):
    config = ModelConfig(
        d_model=64,
        num_layers=2,
        num_heads=4,
        num_experts=options.num_experts,
        d_hidden=64,
        top_k=2,
        gate=options.gate,
        ep_size=ep_size,
    )
    torch.manual_seed(options.seed)
    return LanguageModel(config).to(options.device, getattr(torch, options.dtype))


def hold_part(model, full, rank):
    """Loads the parameters of the one-process model `full`: of each layer's experts those that live on this rank."""
    state = full.state_dict()
    for name, value in model.state_dict().items():
        if value.shape != state[name].shape:
            num_local = value.shape[0]
            state[name] = state[name][rank * num_local : (rank + 1) * num_local]
    model.load_state_dict(state)


def train(model, clip, corpus, options, rank, num_ranks):
    """The loss of every step, over the whole batch; this rank computes its share of the windows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    language_model = getattr(model, "module", model)
    losses = []
    for step in range(1, options.steps + 1):
        inputs, targets = corpus.batch(step, options.batch_size, options.seq_len, options.seed)
        inputs, targets = (
            part.tensor_split(num_ranks)[rank].to(options.device) for part in (inputs, targets)
        )
        optimizer.zero_grad()
        logits = model(inputs).flatten(0, 1)
        # The job's loss is the mean of the ranks' losses: each rank's sum, over the mean number of tokens of a rank.
        tokens_per_rank = options.batch_size * options.seq_len / num_ranks
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum") / tokens_per_rank
        (loss + 0.03 * language_model.pop_balance_loss()).backward()
        if num_ranks > 1:
            model.allreduce_params()
        clip(model, 1.0)
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if num_ranks > 1:
        dist.all_reduce(losses)
    return (losses / num_ranks).tolist()


def run_rank(options):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if options.num_experts % num_ranks:
        raise SystemExit(
            f"--num-experts {options.num_experts} cannot be spread evenly over {num_ranks} ranks"
        )
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    corpus = load_corpus(options.data, options.seq_len)
    full = make_model(options, 1)
    model = make_model(options, num_ranks)
    hold_part(model, full, rank)
    model = DistributedGroupedDataParallel(model, auto_allreduce=True)
    spread = train(model, clip_grad_norm_, corpus, options, rank, num_ranks)
    if rank == 0:
        alone = train(
            full, lambda m, norm: torch.nn.utils.clip_grad_norm_(m.parameters(), norm), corpus, options, 0, 1
        )
        report(alone, spread, num_ranks, options)
    dist.barrier()


def report(alone, spread, num_ranks, options):
    print(f"{'step':>4}  {'1 process':>16}  {f'{num_ranks} processes':>16}  difference")
    for step, (a, b) in enumerate(zip(alone, spread, strict=True), 1):
        if step == 1 or step % 5 == 0 or step == len(alone):
            print(f"{step:4}  {a:16.12f}  {b:16.12f}  {abs(a - b):.1e}")
    largest = max(abs(a - b) for a, b in zip(alone, spread, strict=True))
    tolerance = {"float64": 1e-9, "float32": 1e-3}[options.dtype]
    if largest > tolerance:
        raise SystemExit(f"the curves differ by {largest:.1e}, more than {tolerance:g}")
    print(f"the loss curves are equal: the largest difference in {len(alone)} steps is {largest:.1e}")


def run_process(rank, options, store):
    """One of the processes that main() starts."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group(
        "gloo" if options.device == "cpu" else "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
    )
    run_rank(options)
    dist.destroy_process_group()


def main():
    options = build_parser().parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
        run_rank(options)
        dist.destroy_process_group()
        return
    load_corpus(options.data, options.seq_len)  # says here what is wrong with the data
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, str(Path(folder, "store")))
        torch.multiprocessing.spawn(run_process, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
