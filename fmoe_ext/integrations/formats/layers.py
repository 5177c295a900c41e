"""What the MoE layers of a model have in common, as one configuration has to say it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.layouts import LAYOUTS
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import check_writable, routing_of
from fmoe_ext.experts import FusedExperts, SharedExperts
from fmoe_ext.layers import FMoE
from fmoe_ext.transformer import FMoETransformerMLP

METHODS = ("forward", "_forward", "expert_fn")  # by which a subclass may compute something else


@dataclass(frozen=True)
class MoELayers:
    """The MoE layers of a decoder: numbers [num_layers] of those that are MoE and of the others, and one layer's facts.

    routing: checkpoint.routing.routing_of. shared: the width of the shared experts, 0 for none.
    """

    moe: tuple[int, ...]
    dense: tuple[int, ...]
    num_experts: int
    d_hidden: int
    routing: Mapping[str, Any]
    shared: int
    shared_gate: bool


def read_layers(state: ModelState, format: str, num_layers: int) -> MoELayers:
    """The MoE layers of a model; CheckpointError, by name, for what a layer of the format would not compute."""
    if not state.layers:
        raise CheckpointError(
            "the model has no FMoETransformerMLP: fmoefy it, or import_model() a Transformers MoE model; a model of "
            "Transformers alone is saved by its save_pretrained"
        )
    numbers: dict[int, str] = {}
    for name, layer in state.layers.items():
        check_computes(name, layer, format)
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or number in numbers:
            raise CheckpointError(f"{name or '(root)'} is not the one MoE layer of a numbered decoder layer")
        numbers[number] = name
    first, *others = state.layers.items()
    for other in others:
        _compare(first, other)
    layer = first[1]
    shared = layer.shared_experts
    return MoELayers(
        moe=tuple(sorted(numbers)),
        dense=tuple(i for i in range(num_layers) if i not in numbers),
        num_experts=layer.num_experts,
        d_hidden=layer.experts.h4toh.weight.shape[2],
        routing=routing_of(layer),
        shared=0 if shared is None else shared.mlp.h4toh.weight.shape[2],
        shared_gate=shared is not None and shared.gate is not None,
    )


def check_computes(name: str, layer: FMoE, format: str) -> None:
    """CheckpointError where a layer is not what a format's tensors and configuration can say."""
    if not isinstance(layer, FMoETransformerMLP) or type(layer.experts) is not FusedExperts:
        raise CheckpointError(
            f"{name or '(root)'} has experts of its own ({type(layer.experts).__name__}), no format has a place for "
            "them: FMoETransformerMLP's are two-layer MLPs"
        )
    for method in METHODS:
        if getattr(type(layer), method) is not getattr(FMoETransformerMLP, method):
            raise CheckpointError(f"{name or '(root)'} ({type(layer).__name__}) has its own {method}()")
    if layer.mask is not None:
        raise CheckpointError(f"{name or '(root)'} has mask=: no format says which tokens go to no expert")
    shared = layer.shared_experts
    if shared is not None and type(shared) is not SharedExperts:
        raise CheckpointError(f"{name or '(root)'} has shared experts of its own ({type(shared).__name__})")
    if shared is not None and LAYOUTS[format].shared and not LAYOUTS[format].shared_gate and shared.gate:
        raise CheckpointError(f"{name or '(root)'} has gated shared experts, those of {format} have no gate")
    check_writable({name: routing_of(layer)}, name, format)


def _compare(first: tuple[str, FMoE], other: tuple[str, FMoE]) -> None:
    """CheckpointError where two layers differ in what one configuration says for all."""
    facts = [_facts(layer) for _, layer in (first, other)]
    for name, value in facts[0].items():
        if facts[1][name] != value:
            raise CheckpointError(
                f"{first[0]} has {name}={value} and {other[0]} has {name}={facts[1][name]}, but config.json says one "
                "value for all layers"
            )


def _facts(layer: FMoE) -> dict[str, Any]:
    shared = layer.shared_experts
    return {
        "num_experts": layer.num_experts,
        "d_hidden": layer.experts.h4toh.weight.shape[2],
        "shared_expert_hidden": None if shared is None else shared.mlp.h4toh.weight.shape[2],
        "shared_expert_gate": shared is not None and shared.gate is not None,
        **dict.fromkeys(("swiglu_alpha", "swiglu_limit", "scale", "normalize"), None),
        **routing_of(layer),
    }
