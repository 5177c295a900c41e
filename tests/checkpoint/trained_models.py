"""A model with all kinds of layers that is trained, saved and loaded."""

import torch
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, SigmoidGate

D, H, E = 6, 5, 4


class Model(nn.Module):
    def __init__(self, num_expert=E, d_hidden=H, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.before = nn.Linear(D, D)
        self.moe = FMoETransformerMLP(num_expert, D, d_hidden, activation="swiglu", gate=SigmoidGate)
        self.separate = FMoE(num_expert, D, expert=lambda d: nn.Linear(d, d))

    def forward(self, x):
        x = self.before(x)
        return self.separate(x + self.moe(x))


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(9, D, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def by_group(model, **options):
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": rest}, {"params": biases, "weight_decay": 0.0}], **options)
