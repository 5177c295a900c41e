"""Find the dense MLPs of Megatron-core's layers for fmoefy, which replaces them (models/target.py)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from fmoe_ext.megatron.core.arguments import activation_of, layer_arguments, process_groups
from fmoe_ext.megatron.core.gate import gate_arguments
from fmoe_ext.megatron.core.layer import FusedNorm, MegatronCoreMLP
from fmoe_ext.megatron.core.table import check_options
from fmoe_ext.models.target import DenseMLP, Options, Target, whole

KIND = "Megatron-core"
LOOKED_FOR = (
    "decoder.layers[i].mlp or encoder.layers[i].mlp with linear_fc1 and linear_fc2 (a model that Megatron has built "
    "with --num-experts has none: docs/megatron.md says how to build it with experts of fmoe_ext)"
)


def find(model: nn.Module, options: Options) -> list[Target]:
    """Find the MLPs of Megatron-core's layers; all tensor-parallel ranks call it together."""
    # Look inside wrappers such as Float16Module
    prefix = ""
    while isinstance(getattr(model, "module", None), nn.Module):
        if type(model).__module__.startswith("megatron.core.distributed"):
            raise ValueError(
                f"the model is wrapped in {type(model).__name__}, whose gradient buffers hold the dense parameters: "
                "call fmoefy before wrapping it"
            )
        model, prefix = model.module, prefix + "module."  # type: ignore[assignment]  # torch: Tensor | Module
    megatron = sys.modules.get("megatron.core.transformer.transformer_layer")
    if megatron is None:  # nothing imported it, so that no layer of it can be there
        return []
    found = []
    for stack in ("encoder", "decoder"):
        layers: Any = getattr(getattr(model, stack, None), "layers", None)
        for index, layer in enumerate(layers if isinstance(layers, nn.ModuleList) else ()):
            mlp = getattr(layer, "mlp", None)
            is_dense = hasattr(mlp, "linear_fc1") and hasattr(mlp, "linear_fc2")
            if isinstance(layer, megatron.TransformerLayer) and is_dense:
                found.append(_target(f"{prefix}{stack}.layers.{index}.mlp", layer, options))
    return found


def _target(path: str, layer: Any, options: Options) -> Target:
    """Describe the MLP of a layer, by Megatron's own options, as a Target; ValueError for what would be lost."""
    config, mlp = layer.config, layer.mlp
    check_options(config, own_gate=options.gate is not None, fills_dense=True)
    groups = process_groups(getattr(layer, "pg_collection", None))
    if not options.distributed_experts and groups.ep.size() > 1:
        raise ValueError(
            f"distributed_experts=False, but expert_model_parallel_size is {groups.ep.size()}: Megatron reduces the "
            "gradients of experts over the other ranks only, so make it 1"
        )
    norm = None
    if (weight := getattr(mlp.linear_fc1, "layer_norm_weight", None)) is not None:
        # Transformer Engine's linear_fc1 has the norm inside; ours stands before the gate, which reads its output.
        bias = getattr(mlp.linear_fc1, "layer_norm_bias", None)
        norm = FusedNorm(config, weight.detach().clone(), None if bias is None else bias.detach().clone())
    if groups.expt_tp.size() != 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {groups.expt_tp.size()} (Megatron's default is the tensor parallel size), "
            "but fmoefy makes experts that are whole on one rank: pass expert_tensor_parallel_size=1 to "
            "initialize_model_parallel (--expert-tensor-parallel-size 1), or use moe_layer_spec"
        )
    moe_kwargs = layer_arguments(config, groups)
    if options.gate is None:
        moe_kwargs |= gate_arguments(config)
    parameters = (mlp.linear_fc1.weight, mlp.linear_fc1.bias, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
    # Transformer Engine has empty tensors for biases that are not there
    w1, b1, w2, b2 = (None if p is None or not p.numel() else p.detach() for p in parameters)
    activation = activation_of(config) if options.activation is None else options.activation
    dense = DenseMLP(config.hidden_size, config.ffn_hidden_size, activation, w1, b1, w2, b2)
    return Target(
        path=path,
        parent=layer,
        attribute="mlp",
        dense=whole(dense, config.gated_linear_unit, groups.tp),  # tensor-parallel ranks put it together
        wrap=lambda moe: MegatronCoreMLP(moe, config, groups, norm, layer_number=layer.layer_number),
        layer_index=layer.layer_number - 1,
        num_layers=config.num_layers,
        moe_kwargs=moe_kwargs,
        notes=() if norm is None else ("the norm inside linear_fc1 was moved in front of the gate",),
    )
