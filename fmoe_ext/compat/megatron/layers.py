"""fmoe.megatron.layers: the MoE layer that FastMoE's patches of Megatron-LM build, and FastMoE's fmoefy()."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.compat import _gates
from fmoe_ext.compat.megatron.balance import generate_megatron_gate_hook
from fmoe_ext.compat.megatron.runtime import layer_arguments
from fmoe_ext.gates import find_gate
from fmoe_ext.models.fmoefy import fmoefy as _fmoefy
from fmoe_ext.transformer import FMoETransformerMLP


class MegatronMLP(FMoETransformerMLP):
    """MoE layer that replaces Megatron's MLP, built from its args; experts over its data-parallel group.

    args: hidden_size, hidden_hidden_size (of a whole expert), fmoe_num_experts or num_experts (of each rank), top_k,
    balance_strategy (name of a gate, where gate is None), distributed_experts, rank, init_method_std, num_layers.
    Called on inp [..., hidden_size] -> (output [..., hidden_size], zero bias [hidden_size]).
    Equivalent to: FMoETransformerMLP(num_experts, hidden_size, hidden_hidden_size, ...)(inp), zeros(hidden_size), with
    weights drawn as Megatron draws them.
    """

    def __init__(self, args: Any, layer_idx: int, gate: Any = None) -> None:
        if gate is None:
            ours = find_gate(args.balance_strategy or "naive")
            # the gates of this package, where there is one: their weights have the model's dtype
            gate = getattr(_gates, getattr(ours, "__name__", ""), ours)
        # process groups, and the options under either of their names
        layout = layer_arguments(args, args.distributed_experts)
        num_experts = getattr(args, "fmoe_num_experts", None) or args.num_experts
        super().__init__(
            num_experts,
            d_model=args.hidden_size,
            d_hidden=args.hidden_hidden_size,
            top_k=args.top_k,
            gate_hook=generate_megatron_gate_hook(layer_idx, num_experts * layout["world_size"]),
            gate=gate,
            **layout,
        )
        self.hidden_size = args.hidden_size
        self.rank = args.rank if args.distributed_experts else 0
        self.sigma = args.init_method_std
        self.num_layers = args.num_layers
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw N(0, sigma^2), smaller by sqrt(2 * layers) for the second matrix; by rank if experts are spread."""
        import numpy

        # Megatron seeds numpy alike on all ranks: without the rank all experts would begin equal
        rng = numpy.random.default_rng(numpy.random.randint(2048) + self.rank)
        _megatron_init_method(self.experts.htoh4, rng, self.sigma)
        _megatron_init_method(self.experts.h4toh, rng, self.sigma / math.sqrt(2.0 * self.num_layers))

    def forward(
        self, inp: torch.Tensor, valid: torch.Tensor | None = None, gate_inp: torch.Tensor | None = None
    ) -> Any:
        output = super().forward(inp, valid, gate_inp)
        return output, output.new_zeros(self.hidden_size)


@torch.no_grad()
def _megatron_init_method(self: Any, rng: Any, sigma: float) -> None:
    """Draw weights from N(0, sigma^2) by a numpy generator, zero bias."""
    self.weight.copy_(torch.as_tensor(rng.normal(0.0, sigma, tuple(self.weight.shape)), device="cpu"))
    if self.bias is not None:
        self.bias.zero_()


# Nothing here uses this class and _random_init_weight(): they are FastMoE's names, for programs that import them
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
    """Draw kaiming_uniform(a=sqrt(5)) of one expert's weight, and its uniform bias, by a numpy generator."""
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

    fmoe_num_experts: experts of each rank; num_experts is its name in FastMoE's README.
    """
    if num_experts is not None and fmoe_num_experts is not None:
        raise ValueError(
            f"num_experts and fmoe_num_experts are one argument, but got {num_experts} and {fmoe_num_experts}"
        )
    # FastMoE counts the experts of each rank, fmoe_ext.fmoefy those of all ranks
    num_local_experts = fmoe_num_experts if num_experts is None else num_experts
    options = (distributed_experts, hidden_hidden_size, top_k, gate, megatron_version)
    return _fmoefy(model, None, *options, num_local_experts=num_local_experts)
