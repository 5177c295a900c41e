"""The model kind of Megatron-LM v2.2 to v3.0.2 for fmoefy (models/target.py says what a kind is).

Layers are found in model.language_model, options in get_args(), process groups in mpu. A layer that fmoefy makes keeps
FastMoE's parameter names, so that old checkpoints load; a forward hook makes its output the (output, bias) that
Megatron expects of an MLP. Its gate_hook keeps the profile of balance.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fmoe_ext.compat.megatron.balance import generate_megatron_gate_hook, reset_gate_hook
from fmoe_ext.compat.megatron.runtime import get_args, get_mpu, layer_arguments, stacks
from fmoe_ext.gates import find_gate
from fmoe_ext.models.recognize import GATED, simplify
from fmoe_ext.models.target import DenseMLP, Options, Target, whole
from fmoe_ext.transformer import FMoETransformerMLP

KIND = "Megatron-LM before Megatron-core"
LOOKED_FOR = (
    "language_model.transformer.layers[i].mlp, language_model.encoder... or language_model.decoder..."
)


def find(model: nn.Module, options: Options) -> list[Target]:
    """Find the MLPs of a legacy Megatron model; all ranks call it together if it is tensor parallel."""
    if type(model).__module__.split(".")[0] == "transformers":
        return []  # some of its models have a language_model, too
    found = [
        (f"language_model.{name}.layers.{i}.mlp", layer)
        for name, layers in stacks(model, options.megatron_version)
        for i, layer in enumerate(layers)
        if hasattr(layer, "mlp")
    ]
    if not found:
        return []
    # what the user does not say, Megatron's options do
    args = get_args()
    arguments = layer_arguments(args, options.distributed_experts)
    given = (getattr(args, name, None) for name in ("fmoe_num_experts", "num_experts"))
    num_expert = options.experts_of_rank(arguments["world_size"]) or next((n for n in given if n), None)
    for name, value in (("top_k", getattr(args, "top_k", None)), ("num_expert", num_expert)):
        if value is not None:
            arguments[name] = value
    if options.gate is None and getattr(args, "balance_strategy", None):
        arguments["gate"] = find_gate(args.balance_strategy)
    num_experts = (num_expert or 0) * arguments["world_size"]

    def as_megatron_mlp(moe: FMoETransformerMLP) -> FMoETransformerMLP:
        moe.register_forward_hook(_add_zero_bias)  # a wrapping module would rename its parameters
        return moe

    return [
        Target(
            path=path,
            parent=layer,
            attribute="mlp",
            dense=_read(layer.mlp, args),
            wrap=as_megatron_mlp,
            finish=partial(reset_gate_hook, len(found)),
            moe_kwargs=arguments | {"gate_hook": generate_megatron_gate_hook(i, num_experts)},
        )
        for i, (path, layer) in enumerate(found)
    ]


# a function of the module, not a nested one, so that it pickles with the model
def _add_zero_bias(moe: Any, _: Any, output: Tensor) -> tuple[Tensor, Tensor]:
    return output, output.new_zeros(moe.d_model)


# the weights of Megatron's ParallelMLP, gathered from the tensor-parallel ranks
def _read(mlp: Any, args: Any) -> DenseMLP:
    first, second = getattr(mlp, "dense_h_to_4h", None), getattr(mlp, "dense_4h_to_h", None)
    d_hidden = getattr(args, "ffn_hidden_size", None) or 4 * args.hidden_size
    activation = simplify(getattr(mlp, "activation_func", "gelu"))
    if activation == "gelu" and getattr(mlp, "bias_gelu_fusion", False):
        activation = "gelu_tanh"  # Megatron's fused kernel computes this one
    gated = bool(getattr(args, "swiglu", False))
    if first is None or second is None:
        reason = f"{type(mlp).__name__} has no dense_h_to_4h and dense_4h_to_h"
        return DenseMLP(args.hidden_size, d_hidden, activation, why_unreadable=reason)
    if gated:
        activation = GATED["silu"]
    parameters = (first.weight, first.bias, second.weight, second.bias)
    w1, b1, w2, b2 = (None if p is None else p.detach() for p in parameters)
    dense = DenseMLP(args.hidden_size, d_hidden, activation, w1, b1, w2, b2)
    if not dist.is_initialized():
        return dense
    return whole(dense, gated, get_mpu().get_tensor_model_parallel_group())
