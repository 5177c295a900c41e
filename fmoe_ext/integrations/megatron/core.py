"""Megatron-core, 0.15 and newer: MoE layers in the place of a model's MLPs, or in its layer specification.

Experts are spread over Megatron's expert-parallel group; Megatron's DistributedDataParallel, optimizers and
dist_checkpointing treat them as they treat Megatron's own.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmoe_ext.ep.workers import GroupWorkers
from fmoe_ext.gates import OneWorker, SoftmaxGate
from fmoe_ext.integrations.megatron.tensor_parallel import whole
from fmoe_ext.integrations.recognize import GATED, simplify
from fmoe_ext.integrations.target import DenseMLP, Target
from fmoe_ext.transformer import FMoETransformerMLP

KIND = "Megatron-core"
LOOKED_FOR = "decoder.layers[i].mlp or encoder.layers[i].mlp with linear_fc1 and linear_fc2"
GROUPS = ("tp", "cp", "ep", "expt_tp", "expt_dp", "dp_cp", "tp_dp_cp")


def find(model, options):
    """The MLPs of Megatron-core's layers; all tensor-parallel ranks call it together."""
    prefix = ""
    while isinstance(getattr(model, "module", None), nn.Module):
        if type(model).__module__.startswith("megatron.core.distributed"):
            raise ValueError(
                f"the model is wrapped in {type(model).__name__}, whose gradient buffers hold the dense parameters: "
                "call fmoefy before wrapping it"
            )
        model, prefix = model.module, prefix + "module."
    return [
        _target(f"{prefix}{stack}.layers.{index}.mlp", layer, options)
        for stack in ("encoder", "decoder")
        for index, layer in _dense_layers(getattr(model, stack, None))
    ]


def _dense_layers(block):
    """(index, layer) of Megatron-core's transformer layers with an ordinary MLP."""
    megatron = sys.modules.get("megatron.core.transformer.transformer_layer")
    layers = getattr(block, "layers", None)
    if megatron is None or not isinstance(layers, nn.ModuleList):
        return
    for index, layer in enumerate(layers):
        mlp = getattr(layer, "mlp", None)
        is_dense = hasattr(mlp, "linear_fc1") and hasattr(mlp, "linear_fc2")
        if isinstance(layer, megatron.TransformerLayer) and is_dense:
            yield index, layer


def _target(path, layer, options):
    config = layer.config
    groups = process_groups(getattr(layer, "pg_collection", None))
    if not options.distributed_experts and groups.ep.size() > 1:
        raise ValueError(
            f"distributed_experts=False, but expert_model_parallel_size is {groups.ep.size()}: Megatron reduces the "
            "gradients of experts over the other ranks only, so make it 1"
        )
    norm = _norm_inside(layer.mlp.linear_fc1, config)
    return Target(
        path=path,
        parent=layer,
        attribute="mlp",
        dense=_read(layer.mlp, config, groups, options),
        wrap=lambda moe: MegatronCoreMLP(moe, config, groups, norm),
        layer_index=layer.layer_number - 1,
        num_layers=config.num_layers,
        moe_kwargs=layer_arguments(config, groups),
        notes=() if norm is None else ("the norm inside linear_fc1 was moved in front of the gate",),
    )


def process_groups(pg_collection=None):
    """Megatron's ProcessGroupCollection with GROUPS: the given one, or that of parallel_state.

    Raises RuntimeError if parallel_state is not initialised.
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    if pg_collection is not None and all(getattr(pg_collection, name, None) for name in GROUPS):
        return pg_collection
    if not parallel_state.model_parallel_is_initialized():
        raise RuntimeError(
            "Megatron's process groups do not exist yet: call "
            "megatron.core.parallel_state.initialize_model_parallel(...) before"
        )
    return ProcessGroupCollection.use_mpu_process_groups(list(GROUPS))


def layer_arguments(config, groups, num_experts=None):
    """Arguments of FMoETransformerMLP for a layer in this layout of processes, with what config says about MoE.

    Raises ValueError for expert tensor parallelism, because our experts are whole on their rank, and for experts that
    cannot be spread evenly.
    """
    if groups.expt_tp.size() != 1:
        raise ValueError(
            f"expert_tensor_parallel_size is {groups.expt_tp.size()} (Megatron's default is the tensor parallel size), "
            "but experts of fmoe_ext are whole on one rank: pass "
            "expert_tensor_parallel_size=1 to initialize_model_parallel (--expert-tensor-parallel-size 1)"
        )
    ep_size = groups.ep.size()
    arguments = {
        "world_size": ep_size,
        "moe_group": groups.ep if ep_size > 1 else None,
        "expert_dp_comm": "moe",
        "bias": config.add_bias_linear,
        "gradient_accumulation_fusion": config.gradient_accumulation_fusion,
    }
    # With sequence parallelism each tensor-parallel rank has tokens of its own, otherwise all have the same.
    if groups.tp.size() > 1 and not config.sequence_parallel:
        arguments["slice_group"] = groups.tp
    num_experts = config.num_moe_experts if num_experts is None else num_experts
    if num_experts is not None:
        if num_experts % ep_size:
            raise ValueError(
                f"num_experts must be a multiple of the expert parallel size {ep_size}, but is {num_experts}"
            )
        arguments["num_expert"] = num_experts // ep_size
        arguments["top_k"] = config.moe_router_topk
    return arguments


class MegatronCoreMLP(nn.Module):
    """An FMoETransformerMLP that is called as Megatron-core calls an MLP.

    hidden_states [s, b, h] -> (output [s, b, h], None). norm, if there is one, comes first. In training the gate's loss
    times config.moe_aux_loss_coeff joins the backward through Megatron's MoEAuxLossAutoScaler, which has the scale of
    the main loss; gate_loss keeps its value. The loss is that of all tokens of a microbatch, on all data, context and
    tensor parallel ranks.
    """

    def __init__(self, moe, config, groups, norm=None):
        super().__init__()
        self.moe = moe
        self.norm = norm
        self.config = config
        self.gate_loss = None
        self._groups = groups
        if config.num_moe_experts is None:
            config.num_moe_experts = (
                moe.num_experts
            )  # only then do Megatron's schedules scale the auxiliary loss
        self._mark_parameters()
        self._share_gate()

    def _mark_parameters(self):
        for p in self.moe.experts.parameters():
            p.allreduce = False  # reduced over the ranks that hold the same experts
            # The gradient norm counts parameters of every tensor-parallel rank: experts differ there.
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = True, 0, 1
        dense = [*self.moe.gate.parameters(), *(() if self.norm is None else self.norm.parameters())]
        for p in dense:
            p.sequence_parallel = (
                self.config.sequence_parallel
            )  # then Megatron sums the gradient over the ranks

    def _share_gate(self):
        gate, groups = self.moe.gate, self._groups
        if groups.tp_dp_cp.size() > 1 and isinstance(
            getattr(gate, "workers", None), (OneWorker, GroupWorkers)
        ):
            # A loss is summed over the tp and cp ranks of a replica and averaged over replicas.
            gate.workers = GroupWorkers(groups.tp_dp_cp, num_copies=groups.tp.size() * groups.cp.size())
        if self.moe.slice_size > 1:
            for p in gate.parameters():
                p.register_hook(lambda grad: _sum_over(groups.tp, grad))

    def forward(self, hidden_states, padding_mask=None, **_):
        if padding_mask is not None:
            raise ValueError("padding_mask is not supported: gates of fmoe_ext count every token")
        x = hidden_states if self.norm is None else self.norm(hidden_states)
        output = self.moe(x)
        gate_loss = self.moe.gate.get_loss()
        if gate_loss is None or not self.training or not torch.is_grad_enabled():
            return output, None
        self.gate_loss = gate_loss.detach()
        return self._attach(output, gate_loss), None

    def _attach(self, output, gate_loss):
        weight = self.config.moe_aux_loss_coeff
        if isinstance(weight, (list, tuple)):
            raise ValueError(
                f"moe_aux_loss_coeff must be one number, the weight of gate_loss, but is {weight}"
            )
        if weight == 0:
            return output
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        if self.config.calculate_per_token_loss:  # gradients will be divided by the number of all tokens
            copies = self._groups.cp.size()
            if self.config.sequence_parallel:
                copies *= self._groups.tp.size()
            weight = weight * copies * output.shape[:-1].numel()
        return MoEAuxLossAutoScaler.apply(output, gate_loss.sum() * weight)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """What megatron.core.dist_checkpointing saves: experts as shards of [E, ...], the rest as copies.

        A checkpoint loads on any expert-parallel size. If only some layers of the model have experts, pass
        metadata={"non_homogeneous_layers": True} to the model's sharded_state_dict.
        """
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        if self.moe.expert_placement is not None:
            raise RuntimeError(
                f"{prefix}moe: experts were moved between ranks, which dist_checkpointing would not know; "
                "save before ep.placement moves them"
            )
        groups, axis = self._groups, len(sharded_offsets)
        state = self.state_dict(keep_vars=True)
        experts = {name: p for name, p in state.items() if name.startswith("moe.experts.")}
        sharded = make_sharded_tensors_for_checkpoint(
            {name: p for name, p in state.items() if name not in experts},
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=groups.tp,
            dp_cp_group=groups.dp_cp,
        )
        for name, p in experts.items():
            sharded[prefix + name] = ShardedTensor.from_rank_offsets(
                prefix + name,
                p,
                *sharded_offsets,
                (axis, groups.ep.rank(), groups.ep.size()),
                replica_id=(0, 0, groups.expt_dp.rank()),
                prepend_axis_num=axis,
            )
        return sharded


class MegatronCoreMoE(MegatronCoreMLP):
    """What moe_layer_spec() builds: the layer from config, its experts the same in every layout of processes."""

    def __init__(self, config, num_experts, norm, moe_kwargs, pg_collection=None, **_):
        groups = process_groups(pg_collection)
        arguments = layer_arguments(config, groups, num_experts) | moe_kwargs
        if "num_expert" not in arguments:
            raise ValueError("pass num_experts to moe_layer_spec, or set num_moe_experts in the config")
        arguments.setdefault("gate", SoftmaxGate)
        arguments.setdefault("d_hidden", config.moe_ffn_hidden_size or config.ffn_hidden_size)
        arguments.setdefault("activation", activation_of(config))
        moe = FMoETransformerMLP(d_model=config.hidden_size, **arguments)
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        moe.to(device, config.params_dtype)
        if config.perform_initialization:
            _initialize(moe, config, groups.ep.rank())
        super().__init__(moe, config, groups, _new_norm(config, device) if norm else None)


def moe_layer_spec(num_experts=None, *, norm=False, **moe_kwargs):
    """A ModuleSpec for submodules.mlp of a layer spec: GPTModel then builds its layers with experts.

    num_experts: experts in all, config.num_moe_experts if None. norm=True puts a norm in front, for the specs of
    Transformer Engine, whose dense MLP has it inside linear_fc1. Other arguments: those of FMoETransformerMLP;
    d_hidden, activation, bias, top_k and the process groups come from config otherwise, gate is SoftmaxGate.
    Raises ValueError, when the model is built, if num_experts is no multiple of the expert parallel size.

    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp = moe_layer_spec(8, top_k=2, gate=SoftmaxGate)
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    params = {"num_experts": num_experts, "norm": norm, "moe_kwargs": moe_kwargs}
    return ModuleSpec(module=MegatronCoreMoE, params=params)


@torch.no_grad()
def _initialize(moe, config, ep_rank):
    """Megatron's initialisation. Every rank draws the weights of all experts, one at a time, and keeps its own."""
    first = ep_rank * moe.num_expert
    experts = ((moe.experts.htoh4, config.init_method), (moe.experts.h4toh, config.output_layer_init_method))
    for linear, init_method in experts:
        for e in range(moe.num_experts):
            drawn = torch.empty_like(linear.weight[0])
            init_method(drawn)
            if first <= e < first + moe.num_expert:
                linear.weight[e - first].copy_(drawn)
    for name, p in moe.gate.named_parameters():
        if p.dim() > 1:
            config.init_method(p)
        elif name.endswith("bias"):
            p.zero_()


def activation_of(config):
    """What a dense MLP of this config computes between its products, as FMoETransformerMLP takes it.

    Raises ValueError for a gated activation that ops.expert_mlp does not compute.
    """
    activation = simplify(config.activation_func)
    if activation == "gelu" and config.bias_activation_fusion:
        activation = "gelu_tanh"  # Megatron's fused kernels compute this one
    if not config.gated_linear_unit:
        return activation
    plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0
    if activation not in tuple(GATED) or not plain:
        raise ValueError(
            f"the gated activation of this model, {activation} with "
            f"activation_func_clamp_value={config.activation_func_clamp_value} and "
            f"glu_linear_offset={config.glu_linear_offset}, is none of {', '.join(GATED.values())}: pass activation="
        )
    return GATED[activation]


def _read(mlp, config, groups, options):
    """The dense MLP; tensor-parallel ranks put it together."""
    parameters = (mlp.linear_fc1.weight, mlp.linear_fc1.bias, mlp.linear_fc2.weight, mlp.linear_fc2.bias)
    given = (None if p is None or not p.numel() else p.detach() for p in parameters)
    activation = activation_of(config) if options.activation is None else options.activation
    dense = DenseMLP(config.hidden_size, config.ffn_hidden_size, activation, *given)
    return whole(dense, config.gated_linear_unit, groups.tp)


def _sum_over(group, grad):
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total


class FusedNorm(nn.Module):
    """The norm that Transformer Engine's linear_fc1 has inside: LayerNorm or RMSNorm, as config says."""

    def __init__(self, config, weight, bias):
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization must be LayerNorm or RMSNorm, but is {config.normalization!r}")
        self.normalization = config.normalization
        self.eps = config.layernorm_epsilon
        self.zero_centered = config.layernorm_zero_centered_gamma  # weight is gamma - 1
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x):
        gamma = self.weight + 1 if self.zero_centered else self.weight
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, gamma.shape, gamma, self.eps)
        return F.layer_norm(x, gamma.shape, gamma, self.bias, self.eps)


def _norm_inside(linear, config):
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return None
    bias = getattr(linear, "layer_norm_bias", None)
    return FusedNorm(config, weight.detach().clone(), None if bias is None else bias.detach().clone())


def _new_norm(config, device):
    new = partial(torch.full, (config.hidden_size,), dtype=config.params_dtype, device=device)
    gamma = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    return FusedNorm(config, new(gamma), new(0.0) if config.normalization == "LayerNorm" else None)
