"""Put our layer into Megatron's specifications of a model: moe_layer_spec() and with_experts().

A specification is a tree of ModuleSpec and dataclasses that names a class for each part of a layer, with its arguments;
Megatron walks it and calls the classes with its config and process groups. So MegatronCoreMoE is made there, not here:
what does not fit raises when the model is built.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext.megatron.core.arguments import activation_of, layer_arguments, process_groups
from fmoe_ext.megatron.core.expert_tensor import WidthShardedMLP
from fmoe_ext.megatron.core.gate import gate_arguments
from fmoe_ext.megatron.core.layer import FusedNorm, MegatronCoreMLP
from fmoe_ext.megatron.core.table import check_options, layers_with_experts


class MegatronCoreMoE(MegatronCoreMLP):
    """The layer that moe_layer_spec() describes; ranks with one seed give it the same initial weights in every layout.

    norm: put a norm in front. moe_kwargs: arguments of FMoETransformerMLP, in place of those from config. in_mtp,
    is_mtp_layer: a layer of multi-token prediction, by with_experts() or by Megatron (0.18 and newer).
    """

    def __init__(
        self,
        config: Any,
        num_experts: int | None,
        norm: bool,
        moe_kwargs: dict[str, Any],
        in_mtp: bool = False,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
        **_: Any,
    ):
        # Check the options and the ranks.
        moe_kwargs = {name: v for name, v in moe_kwargs.items() if name != "gate" or v is not None}
        check_options(config, own_gate="gate" in moe_kwargs)
        groups = process_groups(pg_collection)
        size = groups.expt_tp.size()
        if size > 1 and dist.get_process_group_ranks(groups.expt_tp) != dist.get_process_group_ranks(
            groups.tp
        ):
            raise ValueError(
                f"expert_tensor_parallel_size={size} must be 1 or tensor_model_parallel_size={groups.tp.size()}, with "
                "the same ranks"
            )
        # Arguments: the user's, else the config's.
        arguments = {} if "gate" in moe_kwargs else gate_arguments(config)
        arguments |= layer_arguments(config, groups, num_experts) | moe_kwargs
        if "num_expert" not in arguments:
            raise ValueError("pass num_experts to moe_layer_spec, or set num_moe_experts in the config")
        arguments.setdefault("d_hidden", config.moe_ffn_hidden_size or config.ffn_hidden_size)
        arguments.setdefault("latent_size", getattr(config, "moe_latent_size", None))
        if "activation" not in arguments:
            arguments["activation"] = activation_of(config)
        # Make it. What its constructor draws depends on the number of experts on this rank: the generator is put back,
        # and _initialize() draws the weights anew.
        with torch.random.fork_rng(devices=[]):
            moe = WidthShardedMLP(d_model=config.hidden_size, width_group=groups.expt_tp, **arguments)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        moe.to(device, config.params_dtype)
        if config.perform_initialization:
            _initialize(moe, config, groups.ep.rank())
        # The norm in front, as Transformer Engine's linear_fc1 begins: weights 1, or 0 where they are gamma - 1.
        fused_norm = None
        if norm:
            new = partial(torch.full, (config.hidden_size,), dtype=config.params_dtype, device=device)
            gamma = 0.0 if config.layernorm_zero_centered_gamma else 1.0
            fused_norm = FusedNorm(
                config, new(gamma), new(0.0) if config.normalization == "LayerNorm" else None
            )
        super().__init__(moe, config, groups, fused_norm, _shared_experts(config, groups))
        self._in_mtp = in_mtp or is_mtp_layer

    def set_layer_number(self, layer_number: int) -> None:
        """Count layers as MegatronCoreMLP does; multi-token prediction's follow the decoder's.

        Raises ValueError if moe_layer_freq leaves the layer dense.
        """
        num_layers = self.config.num_layers
        if self._in_mtp and layer_number <= num_layers:
            layer_number += num_layers
        if layer_number <= num_layers and not layers_with_experts(self.config)[layer_number - 1]:
            raise ValueError(
                f"moe_layer_freq={self.config.moe_layer_freq!r} is refused: it leaves layer {layer_number} dense, but "
                "the specification has experts there: pass Megatron's own, get_gpt_decoder_block_spec(config, ...), "
                "to fmoe_ext.megatron.with_experts"
            )
        super().set_layer_number(layer_number)


def moe_layer_spec(num_experts: int | None = None, *, norm: bool = False, **moe_kwargs: Any) -> Any:
    """Return a ModuleSpec for submodules.mlp of a layer spec: GPTModel then builds its layers with experts.

    num_experts: experts in all, config.num_moe_experts if None. norm=True puts a norm in front, for the specs of
    Transformer Engine, whose dense MLP has it inside linear_fc1. Other arguments: those of FMoETransformerMLP; gate,
    d_hidden, activation, bias, top_k and the process groups come from config otherwise. docs/megatron.md says what
    becomes of each MoE option of the config.
    Raises ValueError, when the model is built, for an option that would not be heeded, and if num_experts is no
    multiple of the expert parallel size.

    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = moe_layer_spec(8, top_k=2)
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    params = {"num_experts": num_experts, "norm": norm, "moe_kwargs": moe_kwargs}
    return ModuleSpec(module=MegatronCoreMoE, params=params)


def with_experts(spec: Any, num_experts: int | None = None, **moe_kwargs: Any) -> Any:
    """Copy Megatron's specification with moe_layer_spec() in place of each MoELayer; dense layers stay.

    spec: of a layer, of a block (get_gpt_decoder_block_spec) or of multi-token prediction (get_gpt_mtp_block_spec).
    Other arguments: those of moe_layer_spec.

    block_spec = with_experts(get_gpt_decoder_block_spec(config, use_transformer_engine=True))
    """
    return _replace(spec, moe_layer_spec(num_experts, **moe_kwargs), in_mtp=False)


def _replace(node: Any, ours: Any, in_mtp: bool) -> Any:
    """Copy a part of a specification with `ours` for each MoELayer; in_mtp: inside multi-token prediction."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    in_mtp = in_mtp or type(node).__name__.startswith("MultiTokenPrediction")
    # a ModuleSpec until 0.16, a partial later
    module = node.func if isinstance(node, partial) else getattr(node, "module", None)
    if isinstance(module, type) and issubclass(module, BaseMoELayer):
        return replace(ours, params=ours.params | {"in_mtp": in_mtp})
    if module is MegatronCoreMoE:  # of an earlier call
        return replace(node, params=node.params | {"in_mtp": in_mtp})
    if isinstance(node, list):
        return [_replace(part, ours, in_mtp) for part in node]
    if not is_dataclass(node) or isinstance(node, type):
        return node
    parts = {field.name: getattr(node, field.name) for field in fields(node)}
    return replace(node, **{name: _replace(part, ours, in_mtp) for name, part in parts.items()})


@torch.no_grad()
def _initialize(moe: WidthShardedMLP, config: Any, ep_rank: int) -> None:
    """Initialise as Megatron does. Every rank draws the weights of all experts, one at a time, and keeps its own.

    So the weights are the same in every layout, if ranks have the same seed.
    """
    # Experts: the same number of draws on every rank, so that their generators stay alike.
    first = ep_rank * moe.num_local_experts
    experts = (("htoh4", config.init_method), ("h4toh", config.output_layer_init_method))
    for name, init_method in experts:
        linear = getattr(moe.experts, name)
        for e in range(moe.num_experts):
            drawn = moe.whole_like(linear.weight[0], f"{name}.weight")
            init_method(drawn)
            if first <= e < first + moe.num_local_experts:
                linear.weight[e - first].copy_(moe.part_of(drawn, f"{name}.weight"))
        if linear.bias is not None:
            linear.bias.zero_()
    # What is whole on every rank: the projections of a latent width, the gate.
    if moe.latent is not None:
        config.init_method(moe.latent.narrow.weight)
        config.output_layer_init_method(moe.latent.widen.weight)
        for linear in (moe.latent.narrow, moe.latent.widen):
            if linear.bias is not None:
                linear.bias.zero_()
    for name, p in moe.gate.named_parameters():
        if p.dim() > 1:
            config.init_method(p)
        elif name.endswith("bias"):
            p.zero_()


def _shared_experts(config: Any, groups: Any) -> nn.Module | None:
    """Build Megatron's own module, of its local parallel layers; None without moe_shared_expert_intermediate_size."""
    if config.moe_shared_expert_intermediate_size is None:
        return None
    if config.add_bias_linear:
        raise ValueError(
            f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size} needs "
            "add_bias_linear=False (--disable-bias-linear): Megatron's shared experts have no biases"
        )
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    config = copy.copy(config)
    config.moe_shared_expert_overlap = False  # it needs the steps of Megatron's token dispatcher
    return SharedExpertMLP(
        config=config,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        gate=getattr(config, "moe_shared_expert_gate", False),
        pg_collection=groups,
    )
