"""A Transformer with experts on several GPUs: experts over the ranks, copies of all the rest, checkpoints.

    torchrun --nproc-per-node 4 examples/several_gpus.py          # one process for each GPU, NCCL
    torchrun --nproc-per-node 2 examples/several_gpus.py --cpu    # the same on a CPU, gloo
    torchrun --nproc-per-node 4 examples/several_gpus.py --resume # goes on; any number of ranks

It learns to repeat random sequences, which needs no data: after 200 steps the loss is far below log(64) = 4.16.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP, checkpoint, gates
from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_, init_groups

VOCABULARY, PERIOD, BATCH = 64, 8, 32  # BATCH: sequences of all ranks


class Block(nn.Module):
    """Attention and experts, each behind a norm and with a residual around it."""

    def __init__(self, d_model: int, groups) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))
        self.mlp = FMoETransformerMLP(
            num_experts=8,  # of all ranks, which share them
            d_model=d_model,
            d_hidden=2 * d_model,
            activation="swiglu",
            gate="softmax",
            world_size=groups.ep.size(),
            moe_group=groups.ep,
            gate_group=groups.world,  # the balance loss is that of the whole batch
            expert_dp_comm="moe",  # copies of an expert, if there are any, are reduced among themselves
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


def make_model(groups, d_model: int = 64) -> nn.Module:
    torch.manual_seed(0)  # every rank draws the same model, and keeps its experts
    blocks = [Block(d_model, groups) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, d_model), *blocks, nn.Linear(d_model, VOCABULARY))


def batch_of(step: int) -> torch.Tensor:
    """This rank's sequences [BATCH / ranks, 4 * PERIOD]: a random word, four times."""
    words = torch.randint(VOCABULARY, (BATCH, PERIOD), generator=torch.Generator().manual_seed(step))
    return words.repeat(1, 4).tensor_split(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="gloo, and no GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--out", default="out/several_gpus", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    options = parser.parse_args()

    dist.init_process_group("gloo" if options.cpu else "nccl")
    # torchrun starts a process for each GPU of a machine, and numbers them
    device = torch.device("cpu" if options.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if BATCH % dist.get_world_size():
        parser.error(f"{dist.get_world_size()} ranks do not divide the {BATCH} sequences of a batch")
    # All ranks share the experts. With ep=2 on 4 ranks there would be two copies of each.
    groups = init_groups(ep=dist.get_world_size())
    model = DistributedGroupedDataParallel(
        make_model(groups).to(device), auto_allreduce=True, **groups.data_parallel_kwargs()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = checkpoint.load(options.out, model, optimizer).step if options.resume else 0

    for step in range(first, options.steps):
        tokens = batch_of(step).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.01 * gates.total_loss(model)).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0:
            dist.all_reduce(loss.detach_())
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)
        if (step + 1) % options.save_every == 0:
            checkpoint.save(options.out, model, optimizer, step=step + 1, keep=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
