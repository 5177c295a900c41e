"""A plain PyTorch MoE model whose parts the museum replaces by published mistakes."""

import torch
import torch.nn.functional as F
from torch import nn

D, HIDDEN, EXPERTS, VOCAB = 12, 10, 4, 23


class Router(nn.Module):
    def __init__(self, top_k=2, bias=False):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(EXPERTS, D))
        self.top_k = top_k
        if bias:
            self.register_buffer("expert_bias", torch.zeros(EXPERTS))

    def scores(self, x):
        return F.linear(x, self.weight).softmax(-1)

    def forward(self, x):
        scores = self.scores(x)
        rank = scores + self.expert_bias if hasattr(self, "expert_bias") else scores
        index = rank.topk(self.top_k, dim=-1).indices
        return scores, self.weights(scores.gather(-1, index)), index

    def weights(self, chosen):
        return chosen


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    router_class, expert_class = Router, Expert

    def __init__(self, top_k=2, bias=False):
        super().__init__()
        self.router = self.router_class(top_k, bias)
        self.experts = nn.ModuleList(self.expert_class() for _ in range(EXPERTS))
        self.balance = torch.zeros(())

    def forward(self, x, valid=None):
        flat = x.reshape(-1, D)
        scores, weights, index = self.router(flat)
        self.balance = self.balance_loss(scores, index, valid)
        self.count(index)
        return self.mix(flat, weights, index).view_as(x)

    def mix(self, x, weights, index):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            y = y.index_add(0, token, self.part(expert, x[token], weights[token, slot, None], number))
        return y

    def part(self, expert, x, weight, number):
        return expert(x) * weight

    def balance_loss(self, scores, index, valid):
        keep = slice(None) if valid is None else valid.flatten()
        chosen = F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        return EXPERTS * (chosen * scores[keep].mean(0)).sum()

    def count(self, index):
        pass


class Model(nn.Module):
    """Two MoE layers between an embedding and a head."""

    def __init__(self, moe=MoE, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(moe(**options) for _ in range(2))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens, valid=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x, valid)
        return self.head(x)


def batch(pad=0):
    tokens = torch.randint(VOCAB, (8, 6), generator=torch.Generator().manual_seed(3))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    return {"tokens": F.pad(tokens, (0, pad)), "valid": F.pad(valid, (0, pad))}


def parts(model, batch):
    logits = model(**batch)[batch["valid"]]
    task = F.cross_entropy(logits, (batch["tokens"][batch["valid"]] * 5 + 2) % VOCAB)
    return task, sum(block.balance for block in model.blocks)


def loss(model, batch):
    task, balance = parts(model, batch)
    return task + 0.1 * balance
