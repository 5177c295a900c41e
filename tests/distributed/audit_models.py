"""A small MoE model in plain PyTorch, its training as a Recipe, and the same with one mistake each."""

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.audit import Recipe
from fmoe_ext.gates import OneRank, SoftmaxGate
from tests.distributed.layouts import ranks_per_node

D, H, E, VOCAB, SAMPLES, SEQ_LEN = 6, 5, 4, 11, 12, 4


class Block(nn.Module):
    def __init__(self, arguments):
        super().__init__()
        self.before = nn.Linear(D, D)
        self.mlp = FMoETransformerMLP(d_model=D, d_hidden=H, top_k=2, gate=SoftmaxGate, **arguments)

    def forward(self, x):
        return x + self.mlp(self.before(x).tanh())


class Model(nn.Module):
    def __init__(self, layout):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(self.expert_arguments(layout)) for _ in range(2))
        self.head = nn.Linear(D, VOCAB)

    @staticmethod
    def expert_arguments(layout):
        return layout.expert_arguments(E)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def balance_loss(self):
        return sum(block.mlp.gate.get_loss() for block in self.blocks)


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "valid": torch.ones_like(tokens[:, 1:], dtype=torch.bool),
    }


def loss(model, batch):
    mean = F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
    return mean, 0.1 * getattr(model, "module", model).balance_loss()


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


RECIPE = Recipe(Model, batch, loss, optimizer=adam)


# One mistake each


def local_balance(layout):
    """The balance loss of each rank's own tokens: their mean is not that of all tokens."""
    model = Model(layout)
    for block in model.blocks:
        block.mlp.gate.ranks = OneRank()
    return model


def without_a_bias(layout):
    model = Model(layout)
    if layout.num_ranks > 1:
        model.head.bias = None
    return model


def clip_local(model):
    """The norm of this rank's experts only."""
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def optimizer_without_gates(model):
    return torch.optim.AdamW([p for name, p in model.named_parameters() if ".gate." not in name], lr=1e-2)


class ForgetfulBlock(nn.Module):
    """Experts in plain PyTorch, one for each token; its gate draws noise from a generator that nobody winds back."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.up = nn.Parameter(torch.randn(E, D, D) / 3)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        noise = torch.randn(E, generator=torch.Generator().manual_seed(self.num_calls), dtype=x.dtype)
        scores = (self.gate(x) + 3 * noise).softmax(-1)
        weight, chosen = scores.max(-1, keepdim=True)
        return x + weight * torch.einsum("bsd,bsdh->bsh", x, self.up[chosen[..., 0]]).tanh()


class ForgetfulModel(Model):
    def __init__(self, layout):
        super().__init__(layout)
        self.blocks = nn.ModuleList([ForgetfulBlock(), ForgetfulBlock()])

    def balance_loss(self):
        return self.head.weight.new_zeros(())


class DropoutModel(Model):
    def __init__(self, layout):
        super().__init__(layout)
        for block in self.blocks:
            block.before = nn.Sequential(block.before, nn.Dropout(0.5))


class MaskedModel(Model):
    """A model whose experts get real tokens only; sees_padding: but whose gate's loss counts all."""

    def forward(self, tokens, valid):
        x = self.embedding(tokens)
        for block in self.blocks:
            rows = x[valid] if not self.sees_padding else x.flatten(0, 1)
            rows = block(rows).type_as(x)
            x = (
                torch.zeros_like(x).masked_scatter(valid[..., None], rows)
                if not self.sees_padding
                else rows.view_as(x)
            )
        return self.head(x)

    sees_padding = False


class NodeModel(MaskedModel):
    """A MaskedModel whose tokens go once to each of two simulated nodes."""

    def __init__(self, layout):
        if layout.ep == 1:
            super().__init__(layout)
            return
        with ranks_per_node(layout.ep // 2):
            super().__init__(layout)

    @staticmethod
    def expert_arguments(layout):
        ways = {"exchange": "node", "overlap_degree": 2} if layout.ep > 1 else {}
        return {**layout.expert_arguments(E), **ways}


class PaddingModel(MaskedModel):
    sees_padding = True


def masked_loss(model, batch):
    logits = model(batch["inputs"], batch["valid"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten()), 0.1 * getattr(
        model, "module", model
    ).balance_loss()


def raises_on_last_rank(layout):
    if layout.groups is not None and layout.groups.world.rank() == layout.num_ranks - 1:
        raise ValueError("no model for the last rank")
    return Model(layout)
