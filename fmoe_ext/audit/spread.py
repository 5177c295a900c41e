"""The experts of a module's FMoE layers, spread over ranks after it was made for one process."""

from __future__ import annotations

from torch import nn

from fmoe_ext.audit.cases import AuditError, Layout
from fmoe_ext.layers import FMoE


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
    if layout.ep > 1:
        layer.spread(layout.groups.ep, gate_group=layout.groups.world)
    else:
        layer.share_gate(layout.groups.world)
    layer.mark_parallel_comm("moe")
