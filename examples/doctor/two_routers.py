"""Two models for `fmoe doctor`, two_routers.py:healthy and :dead_router."""

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    """Four experts, one of them for each token."""

    def __init__(self, normalise: bool) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        parts = [(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4)]
        self.experts = nn.ModuleList(nn.Sequential(*three) for three in parts)
        self.normalise = normalise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = F.softmax(self.router(x), -1).topk(1)
        # the weight of one expert becomes 1, whatever the router says
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(index == number)
            y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return y


def _made(normalise: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MoE(normalise), torch.randn(32, 16)


def healthy() -> tuple[nn.Module, torch.Tensor]:
    """Return a model without a mistake, and its batch."""
    return _made(normalise=False)


def dead_router() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose router gets no gradient, and its batch."""
    return _made(normalise=True)
