"""Make an MoE layer that Megatron-core calls, trains and saves as it does an MLP: MegatronCoreMLP.

specs.py builds it inside a model, dense.py in place of an MLP. Megatron reads how to treat a parameter from its
attributes, which the layer sets once, when it is made:

    allreduce=False        reduced over the ranks with the same experts only
    sequence_parallel      gradients are summed over tensor-parallel ranks
    tensor_model_parallel  the gradient norm counts every rank's part

Without sequence parallelism a hook on the gate's parameters sums their gradients over tensor-parallel ranks.

The gate's loss is that of all tokens of a microbatch, on all ranks. It joins the backward through Megatron's
MoEAuxLossAutoScaler, which gives it the gradient that the schedule has set for the main loss. A loss of each
sequence needs sequences one after the other: Megatron's [s, b, h] is transposed on the way in and out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.gates import NaiveGate, OneRank
from fmoe_ext.megatron.core.expert_tensor import sharded_parts
from fmoe_ext.megatron.core.gate import FromConfig, loss_weights, only
from fmoe_ext.transformer import FMoETransformerMLP

# names of track_moe_metrics for the gate's balance_loss, where it is not "load_balancing_loss"
LOGGED_AS = MappingProxyType({"sequence": "seq_load_balancing_loss", "running": "global_load_balancing_loss"})


class MegatronCoreMLP(nn.Module):
    """An FMoETransformerMLP that is called as Megatron-core calls an MLP.

    hidden_states [s, b, h] -> (output [s, b, h], None). norm, if there is one, comes first; the output of
    shared_experts, Megatron's own module, is added. In training the gate's loss times config.moe_aux_loss_coeff joins
    the backward through Megatron's MoEAuxLossAutoScaler, which has the scale of the main loss; gate_loss keeps its
    value. The loss is that of all tokens of a microbatch, on all data, context and tensor parallel ranks.
    padding_mask [b, s], True for padding as Megatron has it: those tokens reach no gate, expert or loss, and get zero
    (of the routed experts; Megatron computes them, but counts them in no loss).
    """

    def __init__(
        self,
        moe: FMoETransformerMLP,
        config: Any,
        groups: Any,
        norm: FusedNorm | None = None,
        shared_experts: nn.Module | None = None,
        layer_number: int | None = None,
    ):
        super().__init__()
        if moe.shared_experts is not None:
            raise ValueError(
                "shared_expert_hidden= is not for Megatron's models: set moe_shared_expert_intermediate_size (and "
                "moe_shared_expert_gate) in the config, whose shared experts are split over tensor-parallel ranks"
            )
        self.moe = moe
        self.norm = norm
        self.shared_experts = shared_experts
        self.config = config
        self.layer_number = layer_number
        self.gate_loss: Tensor | None = None
        self._groups = groups
        if config.num_moe_experts is None:
            # Megatron's schedules scale the auxiliary loss only where this is set
            config.num_moe_experts = moe.num_experts
        # Attributes by which Megatron treats the parameters: of experts, then of what is the same on all ranks.
        gate = moe.gate
        for name, p in moe.experts.named_parameters():
            p.allreduce = False  # reduced over the ranks that hold the same experts
            # Experts differ between tensor-parallel ranks, so that the gradient norm counts them on each; a bias that
            # all of them hold counts once.
            is_copy = groups.expt_tp.size() > 1 and name == "h4toh.bias"
            p.tensor_model_parallel, p.partition_dim, p.partition_stride = not is_copy, 0, 1
        modules = [module for module in (gate, moe.latent, norm) if module is not None]
        dense: list[Any] = [p for module in modules for p in module.parameters()]
        for p in dense:
            # with sequence parallelism each rank has tokens of its own, and Megatron sums the gradient over the ranks
            p.sequence_parallel = config.sequence_parallel
        # The ranks over which the gate's loss is summed.
        if groups.tp_dp_cp.size() > 1 and isinstance(getattr(gate, "ranks", None), (OneRank, GroupRanks)):
            # Megatron sums gradients over the tp and cp ranks of a replica, and averages them over replicas.
            gate.ranks = GroupRanks(groups.tp_dp_cp, num_copies=groups.tp.size() * groups.cp.size())
        sequence_group = groups.tp_cp if config.sequence_parallel else groups.cp
        if self._balances_sequences and sequence_group.size() > 1:
            gate.sequence_ranks = GroupRanks(sequence_group)
        # Without sequence parallelism the ranks of tp have the same tokens, and each routes a part of them: the gate's
        # gradients are parts too, which Megatron does not sum.
        if moe.slice_size > 1:

            def sum_over_tp(grad: Tensor) -> Tensor:
                total = grad.clone()
                dist.all_reduce(total, group=groups.tp)
                return total

            latent = () if moe.latent is None else moe.latent.parameters()
            for p in (*gate.parameters(), *latent):
                p.register_hook(sum_over_tp)
        has_loss = type(gate) is not NaiveGate and getattr(gate, "balance_loss", "global") is not None
        if has_loss and self._loss_factor() == 0 and not getattr(gate, "bias_update_speed", 0):
            warnings.warn(
                "moe_aux_loss_coeff is 0, Megatron's default (FastMoE's --balance-loss-weight was 1): the gates' "
                "balance loss trains nothing. Set --moe-aux-loss-coeff, 0.01 for instance, or say "
                "--moe-router-load-balancing-type none",
                stacklevel=3,
            )

    def set_layer_number(self, layer_number: int) -> None:
        """Take the number of the layer, from 1 in the decoder; Megatron's TransformerLayer calls it."""
        self.layer_number = layer_number

    @property
    def _balances_sequences(self) -> bool:
        return "sequence" in getattr(self.moe.gate, "balance_losses", ())

    def _loss_factor(self) -> float:
        if isinstance(self.moe.gate, FromConfig):
            return loss_weights(self.config)[0]
        return only(self.config.moe_aux_loss_coeff)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        for name, value in others.items():  # what newer Megatrons pass to an MLP
            if value is not None:
                raise ValueError(f"{name} is not supported")
        if self._recomputes("moe"):
            return _checkpoint(partial(self._forward, padding_mask=padding_mask), hidden_states), None
        return self._forward(hidden_states, padding_mask), None

    def _forward(self, hidden_states: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Compute the layer: hidden_states [s, b, h], padding_mask [b, s] -> [s, b, h]."""
        x = hidden_states if self.norm is None else self.norm(hidden_states)
        valid = None if padding_mask is None else ~padding_mask.bool()  # [b, s]
        num_tokens = x.shape[:-1].numel() if valid is None else valid.sum()
        if self._balances_sequences:  # the gate sees one sequence after the other
            if isinstance(self.moe.gate, FromConfig):
                self.moe.gate.seq_len = x.shape[0]
            output = self.moe(x.transpose(0, 1), valid).transpose(0, 1)
        else:
            output = self.moe(x, None if valid is None else valid.t())
        output = self._with_gate_loss(output, num_tokens)
        if self.shared_experts is None:
            return output
        if self._recomputes("shared_experts"):
            return output + _checkpoint(self.shared_experts, x)
        return output + self.shared_experts(x)

    def _recomputes(self, module: str) -> bool:
        """Return True if recompute_modules names the module and this forward keeps anything for a backward."""
        config = self.config
        selective = config.recompute_granularity == "selective" and module in (config.recompute_modules or ())
        return selective and self.training and torch.is_grad_enabled()

    def _with_gate_loss(self, output: Tensor, num_tokens: int | Tensor) -> Tensor:
        """Return the output, whose backward also runs that of the gate's loss; log the loss."""
        gate_loss = self.moe.gate.get_loss()
        if gate_loss is None or not self.training or not torch.is_grad_enabled():
            return output
        gate_loss = gate_loss.sum()
        self.gate_loss = gate_loss.detach()
        weight = self._loss_factor()
        if weight == 0:
            return output
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, save_to_aux_losses_tracker

        # Leave the loss where Megatron's track_moe_metrics reads it, under the names that it knows.
        config, gate = self.config, self.moe.gate
        values: dict[str, Tensor] = {}
        if isinstance(getattr(gate, "balance_loss", None), Mapping):  # a gate with several losses
            values = {
                LOGGED_AS.get(kind, "load_balancing_loss"): v for kind, v in gate.balance_values.items()
            }
        if not values:
            only_z = isinstance(gate, FromConfig) and loss_weights(config)[1] == 0
            kind = getattr(gate, "balance_loss", None) or "global"
            values = {"z_loss" if only_z else LOGGED_AS.get(kind, "load_balancing_loss"): self.gate_loss}
        num_layers = config.num_layers + (getattr(config, "mtp_num_layers", None) or 0)
        if self.layer_number is not None:
            for name, value in values.items():
                save_to_aux_losses_tracker(name, value, self.layer_number, num_layers)
        # Megatron will divide gradients by the number of all tokens: the mean of this microbatch becomes its sum.
        if config.calculate_per_token_loss:
            copies = self._groups.cp.size()
            if config.sequence_parallel:
                copies *= self._groups.tp.size()
            weight = weight * copies * num_tokens
        return MoEAuxLossAutoScaler.apply(output, gate_loss * weight)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Make the shards for megatron.core.dist_checkpointing: experts as parts of [E, ...], the rest as copies.

        A checkpoint loads on any expert-parallel size. If only some layers of the model have experts, pass
        metadata={"non_homogeneous_layers": True} to the model's sharded_state_dict.
        """
        if self.moe.expert_placement is not None:
            raise RuntimeError(
                f"{prefix}moe: experts were moved between ranks, which dist_checkpointing would not know; "
                "save before ep.placement moves them"
            )
        # Sort by who makes the shards: Megatron for copies, expert_tensor.py, Megatron's own shared experts.
        state = self.state_dict(keep_vars=True)
        experts = {name: p for name, p in state.items() if name.startswith("moe.experts.")}
        shared = {name for name in state if name.startswith("shared_experts.")}
        copies = {name: p for name, p in state.items() if name not in experts and name not in shared}
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint as make

        groups = {"tp_group": self._groups.tp, "dp_cp_group": self._groups.dp_cp}
        known = inspect.signature(make).parameters  # 0.15 asks parallel_state for them
        groups = {name: group for name, group in groups.items() if name in known}
        sharded: dict[str, Any] = make(copies, prefix, sharded_offsets=sharded_offsets, **groups)
        for name, p in experts.items():
            inside = name.removeprefix("moe.experts.")
            sharded[prefix + name] = sharded_parts(
                self.moe, prefix + name, inside, p, sharded_offsets, self._groups
            )
        if self.shared_experts is not None:
            metadata = {"dp_cp_group": self._groups.dp_cp, **(metadata or {})}
            inside = f"{prefix}shared_experts."
            shared_experts: Any = self.shared_experts  # Megatron's SharedExpertMLP
            sharded |= shared_experts.sharded_state_dict(inside, sharded_offsets, metadata)
        return sharded


def _checkpoint(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call Megatron's checkpoint: the backward computes function(x) again, with the same random numbers."""
    from megatron.core.tensor_parallel import checkpoint

    return checkpoint(function, False, x)


class FusedNorm(nn.Module):
    """The norm that Transformer Engine's linear_fc1 has inside, as a module of its own.

    LayerNorm or RMSNorm of [..., h], as config says; ValueError for another.
    """

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
        dtype = x.dtype
        gamma: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.zero_centered:
            # in float32 as Transformer Engine: 1 + weight in bfloat16 would lose weights below 2^-8
            wide = torch.promote_types(dtype, torch.float32)
            x, gamma, bias = x.to(wide), gamma.to(wide) + 1, None if bias is None else bias.to(wide)
        if self.normalization == "RMSNorm":
            return F.rms_norm(x, gamma.shape, gamma, self.eps).to(dtype)
        return F.layer_norm(x, gamma.shape, gamma, bias, self.eps).to(dtype)
