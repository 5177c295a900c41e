"""Mistakes of how a MoE layer is wired: parts that never run, gradients that are cut, weights of other scores."""

from dataclasses import replace

import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP
from tests.doctor.museum import exhibit, moe_with, router_with, subject
from tests.doctor.plain import EXPERTS, Expert, Model, MoE, Router, loss, parts


class Skips(Model):
    """The second MoE layer never runs."""

    def forward(self, tokens, valid=None):
        x = self.embed(tokens)
        x = x + self.blocks[0](x, valid)
        return self.head(x)


@exhibit("used", None)
def layer_that_never_runs():
    return subject(model=Skips)


class Shared(MoE):
    """A shared expert beside the routed ones."""

    keeps = True

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.shared = Expert()

    def mix(self, x, weights, index):
        shared = self.shared(x)
        return super().mix(x, weights, index) + (shared if self.keeps else 0)


@exhibit("used", None)
def shared_expert_computed_and_dropped():
    return subject(type("Drops", (Shared,), {"keeps": False}))


class Plain(Expert):
    """An expert whose output bias is added later."""

    def forward(self, x):
        return nn.functional.gelu(self.up(x)) @ self.down.weight.T


@exhibit("weighted", "Automodel#2591")
def down_bias_without_a_weight():
    def part(self, expert, x, weight, number):
        return expert(x) * weight + expert.down.bias

    return subject(moe_with(expert=Plain, part=part))


def biased_scores(self, x):
    scores = self.scores(x)
    rank = scores + self.expert_bias
    weights, index = rank.topk(self.top_k, dim=-1)
    return scores, weights / weights.sum(-1, keepdim=True), index


@exhibit("choice-bias", "PaddleFormers#3452")
def weights_of_biased_scores():
    return subject(model=lambda: Model(moe_with(router_with(forward=biased_scores)), bias=True))


class Gated(nn.Module):
    """A SwiGLU expert."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(12, 10), nn.Linear(12, 10), nn.Linear(10, 12)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def frozen_by_name(made, word):
    for name, p in made.model.named_parameters():
        if word in name:
            p.requires_grad_(False)
    return made


@exhibit("frozen", None)
def freezing_gate_freezes_gate_proj():
    return frozen_by_name(subject(moe_with(expert=Gated)), "gate")


class Mixtral(nn.Module):
    """A SwiGLU expert whose matrices have numbers for names."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(12, 10), nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


@exhibit("frozen", None)
def freezing_one_of_numbered_matrices():
    return frozen_by_name(subject(moe_with(expert=Mixtral)), "w1")


def our_layer():
    made = subject(
        model=lambda: FMoETransformerMLP(4, 12, 10),
        loss=lambda model, x: model(x).square().mean(),
        parts=None,
        padded=None,
    )
    return replace(made, batch=torch.randn(16, 12, generator=torch.Generator().manual_seed(2)))


@exhibit("frozen", None)
def freezing_htoh4_of_our_layer():
    return frozen_by_name(our_layer(), "htoh4")


class Accumulates(MoE):
    """Keeps the balance losses of all steps in a list."""

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.losses = []

    def balance_loss(self, scores, index, valid):
        self.losses.append(super().balance_loss(scores, index, valid))
        return sum(x.detach() for x in self.losses[:-1]) + self.losses[-1]


@exhibit("cleared", None)
def balance_losses_never_cleared():
    return subject(Accumulates)


@exhibit("input-gradient", None)
def detached_expert_inputs():
    def part(self, expert, x, weight, number):
        return expert(x.detach()) * weight

    return subject(moe_with(part=part))


@exhibit("registered", None)
def experts_in_a_plain_list():
    def init(self, top_k=2, bias=False):
        MoE.__init__(self, top_k, bias)
        del self.experts
        self.experts = [Expert() for _ in range(EXPERTS)]

    return subject(moe_with(__init__=init))


@exhibit("experts-differ", None)
def one_expert_many_times():
    def init(self, top_k=2, bias=False):
        MoE.__init__(self, top_k, bias)
        self.experts = nn.ModuleList([Expert()] * EXPERTS)

    return subject(moe_with(__init__=init))


class RectifiedRouter(MoE):
    """ReMoE: every expert whose score is positive, so that a token may have none."""

    def forward(self, x, valid=None):
        flat = x.reshape(-1, x.shape[-1])
        weights = (flat @ self.router.weight.T - 0.5).relu()
        y = sum(weights[:, e, None] * expert(flat) for e, expert in enumerate(self.experts))
        self.balance = weights.sum() * 0
        return y.view_as(x)


class OneForTheLast(MoE):
    """An expert that only the last token of a sample chooses, whose output no loss reads."""

    def forward(self, x, valid=None):
        self.tokens = x.shape[1]
        return super().forward(x, valid)

    def mix(self, x, weights, index):
        last = (torch.arange(len(x)) % self.tokens == self.tokens - 1)[:, None]
        other = torch.where(index == EXPERTS - 1, (index.flip(-1) + 1) % (EXPERTS - 1), index)
        return super().mix(x, weights, torch.where(last, index, other))


class Named(MoE):
    """Experts in a dict, under names with numbers."""

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.experts = nn.ModuleDict({f"expert{e}": Expert() for e in range(EXPERTS)})

    def part(self, expert, x, weight, number):
        return self.experts[expert](x) * weight


class BiasedRouter(Router):
    """A linear router whose bias is part of its scores."""

    def __init__(self, top_k=2, bias=False):
        super().__init__(top_k, bias)
        self.bias = nn.Parameter(0.1 * torch.randn(EXPERTS))

    def scores(self, x):
        return nn.functional.linear(x, self.weight, self.bias).softmax(-1)


def next_token_parts(model, batch):
    logits = model(**batch)[:, :-1]
    task = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())
    return task, sum(block.balance for block in model.blocks)


def healthy_models():
    """Models without a mistake at which a rule might bark."""
    yield "shared expert", subject(Shared)
    yield "gated experts", subject(moe_with(expert=Gated))
    yield "ReLU router", subject(RectifiedRouter, parts=None, loss=lambda m, b: parts(m, b)[0])
    yield (
        "loss of the next token",
        subject(
            parts=next_token_parts,
            loss=lambda m, b: sum(next_token_parts(m, b)),
            balance_weight=1.0,
            padded=None,
        ),
    )
    frozen = subject()
    for block in frozen.model.blocks:
        block.router.requires_grad_(False)
    yield "frozen routers", frozen
    frozen = subject()
    frozen.model.blocks[0].experts[0].requires_grad_(False)
    yield "one frozen expert", frozen
    made = frozen_by_name(subject(moe_with(expert=Mixtral)), "blocks.0.experts.0")
    yield "one frozen expert with numbered matrices", made
    yield "one frozen expert of a dict", frozen_by_name(subject(Named), "expert1")
    yield "frozen router with a bias of its scores", frozen_by_name(subject(moe_with(BiasedRouter)), "router")
    yield "frozen gate of our layer", frozen_by_name(our_layer(), "gate")
    yield "frozen bias of our gate", frozen_by_name(our_layer(), "gate.bias")
    yield "bias of the choice", subject(model=lambda: Model(bias=True), loss=loss)
