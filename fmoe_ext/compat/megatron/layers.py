"""fmoe.megatron.layers; imports without Megatron-LM."""

import importlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.compat._core import core
from fmoe_ext.compat.megatron.balance import generate_megatron_gate_hook
from fmoe_ext.gates import find_gate
from fmoe_ext.transformer import FMoETransformerMLP


class _FakeMegatronMLP(nn.Module):
    """A dense MLP with the interface of Megatron's: returns (output, bias)."""

    def __init__(self, args, _):
        super().__init__()
        self.fc1 = nn.Linear(args.hidden_size, args.hidden_hidden_size)
        self.fc2 = nn.Linear(args.hidden_hidden_size, args.hidden_size)

    def forward(self, x):
        x = self.fc2(F.relu(self.fc1(x)))
        return x, torch.zeros_like(x)


@torch.no_grad()
def _megatron_init_method(self, rng, sigma):
    """Weights from N(0, sigma^2) by a numpy generator, zero bias."""
    self.weight.copy_(torch.as_tensor(rng.normal(0.0, sigma, tuple(self.weight.shape))))
    if self.bias is not None:
        self.bias.zero_()


@torch.no_grad()
def _random_init_weight(self, rng):
    """kaiming_uniform(a=sqrt(5)) over one expert's weight, and its uniform bias, by a numpy generator."""
    fan_in = self.weight.shape[-1]
    bound = 1 / math.sqrt(fan_in)
    self.weight.copy_(torch.as_tensor(rng.uniform(-bound, bound, tuple(self.weight.shape))))
    if self.bias is not None:
        self.bias.copy_(torch.as_tensor(rng.uniform(-bound, bound, tuple(self.bias.shape))))


class MegatronMLP(FMoETransformerMLP):
    """The MoE layer in the place of Megatron's MLP, built from its args; experts over its data-parallel group."""

    def __init__(self, args, layer_idx, gate=None):
        world_size, moe_group = 1, None
        if args.distributed_experts and args.data_parallel_size > 1:
            world_size = args.data_parallel_size
            moe_group = importlib.import_module("megatron.mpu").get_data_parallel_group()
        num_experts = getattr(args, "fmoe_num_experts", None) or args.num_experts
        super().__init__(
            num_experts,
            d_model=args.hidden_size,
            d_hidden=args.hidden_hidden_size,
            top_k=args.top_k,
            world_size=world_size,
            moe_group=moe_group,
            expert_dp_comm="none" if args.distributed_experts else "dp",
            gate_hook=generate_megatron_gate_hook(layer_idx, num_experts * world_size),
            gate=find_gate(args.balance_strategy or "naive") if gate is None else gate,
        )
        self.hidden_size = args.hidden_size
        self.rank = args.rank if args.distributed_experts else 0
        self.sigma = args.init_method_std
        self.num_layers = args.num_layers
        self.tensor_parallel = getattr(args, "tensor_model_parallel_size", 1) > 1
        self.reset_parameters()

    def reset_parameters(self):
        """N(0, sigma^2), smaller by sqrt(2 * layers) for the second matrix; another draw on every rank."""
        import numpy

        rng = numpy.random.default_rng(numpy.random.randint(2048) + self.rank)
        _megatron_init_method(self.experts.htoh4, rng, self.sigma)
        _megatron_init_method(self.experts.h4toh, rng, self.sigma / math.sqrt(2.0 * self.num_layers))

    def forward(self, inp):
        """inp [..., hidden_size] -> (output, zero bias [hidden_size]), as Megatron's MLP."""
        output = super().forward(inp)
        if self.tensor_parallel:
            output = importlib.import_module("megatron.mpu").reduce_from_tensor_model_parallel_region(output)
        return output, output.new_zeros(self.hidden_size)


def fmoefy(
    model,
    fmoe_num_experts=None,
    distributed_experts=True,
    hidden_hidden_size=None,
    top_k=None,
    gate=None,
    megatron_version=None,
):
    """Replaces the MLPs of a Megatron model by MoE layers; the version is detected if it is not given."""
    replace = core("integrations.megatron", "fmoefy", "fmoe.megatron.fmoefy")
    return replace(
        model,
        fmoe_num_experts=fmoe_num_experts,
        distributed_experts=distributed_experts,
        hidden_hidden_size=hidden_hidden_size,
        top_k=top_k,
        gate=gate,
        megatron_version=megatron_version,
    )
