"""The experts of a module's FMoE layers, spread over ranks after it was made for one process."""

from __future__ import annotations

from typing import Any

from torch import nn

from fmoe_ext.audit.cases import AuditError, Layout
from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.ranks import GroupRanks
from fmoe_ext.gates import OneRank
from fmoe_ext.layers import FMoE
from fmoe_ext.linear import FMoELinear


def spread_experts(model: nn.Module, layout: Layout) -> nn.Module:
    """Leaves on this rank its share of the experts of every FMoE layer -> the model, changed in place.

    Raises AuditError for layers that are spread already, or whose experts do not divide.
    """
    if layout.groups is None:
        return model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FMoE)}
    if not layers and layout.ep > 1:
        raise AuditError(
            f"{type(model).__name__} has no FMoE layer whose experts could be spread over {layout.ep} ranks: give a "
            'function that builds it for a layout, or leave_out={"ep": reason}'
        )
    for name, layer in layers.items():
        _spread(name, layer, layout)
    return model


def _spread(name: str, layer: FMoE, layout: Layout) -> None:
    assert layout.groups is not None
    if layer.expert_parallel is not None:
        raise AuditError(
            f"{name} is spread over ranks already: audit() takes a model that was made for one process"
        )
    if layer.num_experts % layout.ep:
        raise AuditError(
            f"{name} has {layer.num_experts} experts, which {layout.ep} ranks cannot share evenly"
        )
    if isinstance(getattr(layer.gate, "ranks", None), OneRank):
        layer.gate.ranks = GroupRanks(layout.groups.world)
    if layout.ep > 1:
        layer.num_expert, layer.world_size = layer.num_experts // layout.ep, layout.ep
        layer.expert_parallel = ExpertParallel(layout.groups.ep, layer.num_expert)
        layer.gate.num_expert, layer.gate.world_size = layer.num_expert, layout.ep
        first = layer.expert_parallel.rank * layer.num_expert
        _keep(layer.experts, first, first + layer.num_expert)
    layer.mark_parallel_comm("moe")


def _keep(experts: Any, first: int, end: int) -> None:
    """Leaves the experts [first, end) of a list of them, or of tensors that hold one in each row."""
    if isinstance(experts, nn.ModuleList):
        kept = list(experts)[first:end]
        del experts[: len(experts)]
        experts.extend(kept)
        return
    for module in experts.modules():
        for key, p in module.named_parameters(recurse=False):
            setattr(module, key, nn.Parameter(p.detach()[first:end].clone(), p.requires_grad))
        if isinstance(module, FMoELinear):
            module.num_expert = end - first
    if hasattr(experts, "num_experts"):
        experts.num_experts = end - first
