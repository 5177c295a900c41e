"""fmoe.megatron.layers."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.compat import _gates
from fmoe_ext.compat.megatron.mlp import MegatronMLP as _MegatronMLP
from fmoe_ext.compat.megatron.mlp import megatron_init_method as _megatron_init_method
from fmoe_ext.gates import find_gate
from fmoe_ext.models.fmoefy import fmoefy as _fmoefy


class MegatronMLP(_MegatronMLP):
    """fmoe_ext.compat.megatron.MegatronMLP with the gates of this package, whose weights have the model's dtype."""

    def __init__(self, args: Any, layer_idx: int, gate: Any = None) -> None:
        if gate is None:
            ours = find_gate(args.balance_strategy or "naive")
            gate = getattr(_gates, getattr(ours, "__name__", ""), ours)
        super().__init__(args, layer_idx, gate)


class _FakeMegatronMLP(nn.Module):
    """A dense MLP with the interface of Megatron's: returns (output, bias)."""

    def __init__(self, args: Any, _: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(args.hidden_size, args.hidden_hidden_size)
        self.fc2 = nn.Linear(args.hidden_hidden_size, args.hidden_size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc2(F.relu(self.fc1(x)))
        return x, torch.zeros_like(x)


@torch.no_grad()
def _random_init_weight(self, rng: Any) -> None:
    """kaiming_uniform(a=sqrt(5)) over one expert's weight, and its uniform bias, by a numpy generator."""
    fan_in = self.weight.shape[-1]
    bound = 1 / math.sqrt(fan_in)
    self.weight.copy_(torch.as_tensor(rng.uniform(-bound, bound, tuple(self.weight.shape)), device="cpu"))
    if self.bias is not None:
        self.bias.copy_(torch.as_tensor(rng.uniform(-bound, bound, tuple(self.bias.shape)), device="cpu"))


def fmoefy(
    model: nn.Module,
    fmoe_num_experts: int | None = None,
    distributed_experts: bool = True,
    hidden_hidden_size: int | None = None,
    top_k: int | None = None,
    gate: Any = None,
    megatron_version: str | None = None,
    *,
    num_experts: int | None = None,
) -> Any:
    """Replace the MLPs of a model by MoE layers; the version of Megatron is detected if it is not given.

    fmoe_num_experts: experts of each rank; num_experts is the name of it that FastMoE's README writes.
    """
    if num_experts is not None and fmoe_num_experts is not None:
        raise ValueError(
            f"num_experts and fmoe_num_experts are one argument, but got {num_experts} and {fmoe_num_experts}"
        )
    num_local_experts = fmoe_num_experts if num_experts is None else num_experts
    options = (distributed_experts, hidden_hidden_size, top_k, gate, megatron_version)
    return _fmoefy(model, None, *options, num_local_experts=num_local_experts)


__all__ = ["MegatronMLP", "_megatron_init_method", "fmoefy"]
