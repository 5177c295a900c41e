"""A small model, parallel plans of it, and the same plans with one mistake each."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fmoe_ext.audit import Parallel, PlanRecipe
from fmoe_ext.audit.plans.fsdp import shard_blocks
from fmoe_ext.audit.plans.pipelining import Staged

D, VOCAB, SAMPLES = 6, 11, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.up(x).tanh() * self.gate(x).sigmoid()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(D, VOCAB)

    def forward(self, x):
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"])


def replicated(model, rank, world):
    return model


def fsdp(model, rank, world):
    return shard_blocks(model)


class Averaged(Parallel):
    """Data parallelism by hand."""

    def __init__(self, model, kept=(), factor=1.0):
        super().__init__(model, (dist.get_rank(), dist.get_world_size()))
        self.kept, self.factor = kept, factor

    def backward(self, recipe, batch):
        loss = super().backward(recipe, batch)
        for name, p in self.model.named_parameters():
            if name not in self.kept:
                dist.all_reduce(p.grad)
                p.grad.mul_(self.factor / dist.get_world_size())
        return loss


def averaged(model, rank, world):
    return Averaged(model)


def stage(model, rank, world):
    """The first block on rank 0, the second on rank 1, two microbatches."""
    part = copy.deepcopy(model)
    part.blocks = nn.ModuleDict({str(rank): part.blocks[rank]})
    if rank:
        part.embedding = None
    else:
        part.head = None
    schedule = ScheduleGPipe(
        PipelineStage(part, rank, world, torch.device("cpu")), n_microbatches=2, loss_fn=cross_entropy
    )
    return Staged(
        part,
        Feeds(schedule, first=not rank),
        inputs=lambda batch: batch["inputs"],
        target=lambda batch: batch["targets"],
    )


class Feeds:
    """Gives the inputs to the first stage alone."""

    def __init__(self, schedule, first):
        self.schedule, self.first = schedule, first

    def step(self, x, **settings):
        self.schedule.step(*((x,) if self.first else ()), **settings)


# One mistake each


def forgets_a_gate(model, rank, world):
    return Averaged(model, kept=["blocks.1.gate.weight"])


def sums_gradients(model, rank, world):
    return Averaged(model, factor=2.0)


def wrong_in_a_block(model, rank, world):
    if rank:
        model.blocks[1].up.register_forward_hook(lambda module, args, out: out + module.bias)
    return model


def wrong_weights(model, rank, world):
    with torch.no_grad():
        model.head.weight[0] += rank
    return model


def without_a_head(model, rank, world):
    return Renamed(model)


class Renamed(Parallel):
    def parameters(self):
        return {name: p for name, p in super().parameters().items() if not name.startswith("head")}


def raises(model, rank, world):
    raise ValueError("no plan")


def no_model(model, rank, world):
    return "model"


def three_samples(step):
    return {name: x[:3] for name, x in batch(step).items()}


RECIPE = PlanRecipe(Model, replicated, batch, loss)
