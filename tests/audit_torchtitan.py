"""A decoder with torchtitan's MoE layer as a recipe of fmoe audit: FSDP and experts over all ranks."""

import torch
from test_torchtitan import Block, D, build, config
from torch import nn
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

from fmoe_ext.audit import PlanRecipe
from fmoe_ext.audit.plans.torchtitan import Decoder

VOCAB, SAMPLES, SEQ_LEN = 32, 8, 6


class Stack(nn.Module):
    """The parts of a decoder that torchtitan's FSDP looks for."""

    enable_weight_tying = False

    def __init__(self, ep=1):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.layers = nn.ModuleDict({"0": Block(build(config(ep=ep), torch.float64, compute="input"))})
        self.lm_head = nn.Linear(D, VOCAB)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        return self.lm_head(self.norm(x + self.layers["0"](x)))


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def shard(model, dims):
    """torchtitan's division of experts and its FSDP."""
    model.layers["0"].moe.parallelize(dims)
    experts = {"ep_degree": dims.ep, "edp_mesh": dims.get_optional_mesh(["efsdp"])}
    mesh = dims.get_mesh(["fsdp"])
    apply_fsdp_to_decoder(model, mesh, torch.float64, torch.float64, pp_enabled=False, **experts)


def divided(model, world):
    """The model of one process as a stack whose experts are to be divided."""
    stack = Stack(ep=world).double()
    stack.load_state_dict(model.state_dict())
    return stack


def parallelize(model, rank, world):
    return Decoder(divided(model, world), shard, ep=world)


class Undivided(Decoder):
    """Losses that nobody divides by the ranks."""

    def backward(self, recipe, batch):
        self.optimizer.zero_grad()
        loss = recipe.loss(self.model, batch)
        loss.backward()
        return loss.detach()


def undivided(model, rank, world):
    return Undivided(divided(model, world), shard, ep=world)


def over_tensors(model, rank, world):
    return Decoder(model, shard, tp=world)


RECIPE = PlanRecipe(Stack, parallelize, batch, loss)
