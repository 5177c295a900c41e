"""The norm that Transformer Engine's linear_fc1 has inside, in front of the gate."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedNorm(nn.Module):
    """LayerNorm or RMSNorm of [..., h], as config says; ValueError for another."""

    def __init__(self, config: Any, weight: Tensor, bias: Tensor | None):
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization must be LayerNorm or RMSNorm, but is {config.normalization!r}")
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma  # weight is gamma - 1
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        gamma = self.weight + 1 if self.zero_centered else self.weight
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, gamma.shape, gamma, self.eps)
        return F.layer_norm(x, gamma.shape, gamma, self.bias, self.eps)


def norm_inside(linear: nn.Module, config: Any) -> FusedNorm | None:
    """A copy of the norm inside Transformer Engine's linear_fc1; None if there is none."""
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return None
    bias = getattr(linear, "layer_norm_bias", None)
    return FusedNorm(config, weight.detach().clone(), None if bias is None else bias.detach().clone())


def new_norm(config: Any, device: torch.device | str | int) -> FusedNorm:
    new = partial(torch.full, (config.hidden_size,), dtype=config.params_dtype, device=device)
    gamma = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    return FusedNorm(config, new(gamma), new(0.0) if config.normalization == "LayerNorm" else None)
