"""MegatronMLP: the MoE layer that FastMoE's patches build from Megatron's options."""

from __future__ import annotations

import math
from typing import Any

import torch

from fmoe_ext.compat.megatron.balance import generate_megatron_gate_hook
from fmoe_ext.compat.megatron.runtime import layer_arguments
from fmoe_ext.gates import find_gate
from fmoe_ext.transformer import FMoETransformerMLP


class MegatronMLP(FMoETransformerMLP):
    """MoE layer that replaces Megatron's MLP, built from its args; experts over its data-parallel group.

    args: hidden_size, hidden_hidden_size (of a whole expert), fmoe_num_experts or num_experts (of each rank), top_k,
    balance_strategy (name of a gate, where gate is None), distributed_experts, rank, init_method_std, num_layers.
    Called on inp [..., hidden_size] -> (output [..., hidden_size], zero bias [hidden_size]).
    Equivalent to: FMoETransformerMLP(num_experts, hidden_size, hidden_hidden_size, ...)(inp), zeros(hidden_size).
    """

    def __init__(self, args: Any, layer_idx: int, gate: Any = None):
        layout = layer_arguments(args, args.distributed_experts)
        num_experts = getattr(args, "fmoe_num_experts", None) or args.num_experts
        super().__init__(
            num_experts,
            d_model=args.hidden_size,
            d_hidden=args.hidden_hidden_size,
            top_k=args.top_k,
            gate_hook=generate_megatron_gate_hook(layer_idx, num_experts * layout["world_size"]),
            gate=find_gate(args.balance_strategy or "naive") if gate is None else gate,
            **layout,
        )
        self.hidden_size = args.hidden_size
        self.rank = args.rank if args.distributed_experts else 0
        self.sigma = args.init_method_std
        self.num_layers = args.num_layers
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, sigma^2), smaller by sqrt(2 * layers) for the second matrix; another draw on every rank."""
        import numpy

        rng = numpy.random.default_rng(numpy.random.randint(2048) + self.rank)
        megatron_init_method(self.experts.htoh4, rng, self.sigma)
        megatron_init_method(self.experts.h4toh, rng, self.sigma / math.sqrt(2.0 * self.num_layers))

    def forward(
        self, inp: torch.Tensor, valid: torch.Tensor | None = None, gate_inp: torch.Tensor | None = None
    ) -> Any:
        output = super().forward(inp, valid, gate_inp)
        return output, output.new_zeros(self.hidden_size)


@torch.no_grad()
def megatron_init_method(self: Any, rng: Any, sigma: float) -> None:
    """Weights from N(0, sigma^2) by a numpy generator, zero bias."""
    self.weight.copy_(torch.as_tensor(rng.normal(0.0, sigma, tuple(self.weight.shape)), device="cpu"))
    if self.bias is not None:
        self.bias.zero_()
