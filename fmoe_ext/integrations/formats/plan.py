"""What export() is going to write: config.json, names and shapes of all tensors, checked before anything is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fmoe_ext.checkpoint import CheckpointError, to_huggingface
from fmoe_ext.checkpoint.families import FAMILIES, formats_for
from fmoe_ext.checkpoint.families.family import Family, Numbers
from fmoe_ext.checkpoint.model_state import ModelState
from fmoe_ext.checkpoint.routing import HIDDEN_ACT, check_writable, routing_of
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.saving import Whole
from fmoe_ext.experts import FusedExperts, SharedExperts
from fmoe_ext.integrations.huggingface_record import take_record
from fmoe_ext.layers import FMoE
from fmoe_ext.transformer import FMoETransformerMLP

METHODS = (
    "forward",
    "_choose",
    "_call_gate",
    "_compute",
    "expert_fn",
)  # by which a subclass computes something else
NOT_COPIED = ("architectures", "model_type", "transformers_version", "_name_or_path", "quantization_config")


@dataclass(frozen=True)
class Plan:
    """What is going to be written; nothing of it is read yet. left_out: names of tied tensors."""

    model: Any
    family: Family
    config: Any
    left_out: frozenset[str]

    def convert(self, whole: Whole) -> dict[str, StoredTensor]:
        """The tensors of Hugging Face's files."""
        tensors = {name: t for name, t in whole.tensors.items() if name not in self.left_out}
        return to_huggingface(tensors, self.family.name, whole.routing)

    def in_memory(self, whole: Whole) -> dict[str, StoredTensor]:
        """All tensors under the names that they have in Transformers' modules."""
        return to_huggingface(whole.tensors, self.family.in_modules)


def check_export(model: nn.Module, format: str) -> None:
    """CheckpointError, before the model is trained, where export(model, folder, format) would raise it.

    Gates, activations and biases decide it, not the values of weights; biases must be zero to be left out.
    """
    plan_export(model, format)


def plan_export(model: nn.Module, format: str) -> Plan:
    """The Plan of an export; CheckpointError for what the format cannot say."""
    if format not in FAMILIES:
        raise CheckpointError(f"format must be one of {', '.join(FAMILIES)} or gguf, but got {format!r}")
    family, state = FAMILIES[format], ModelState(model)
    values = values_of(state.model)
    facts, moe = _facts_of_layers(state, family)
    config = _make_config(family, values, facts, moe)
    shapes = {
        name: StoredTensor(state.global_shape(name), value.dtype, value.detach)
        for name, value in state.tensors.items()
    }
    tied = _tied(state, config)
    _check_names(to_huggingface(shapes, family.in_modules), config, state.model, tied)
    return Plan(state.model, family, config, tied)


def values_of(model: Any) -> dict[str, Any]:
    """The values of a Transformers model's configuration, those of the dense model if it was fmoefied."""
    if not hasattr(getattr(model, "config", None), "to_dict"):
        raise CheckpointError(
            f"{type(model).__name__} is no model of Transformers, which these formats are for: "
            "fmoe_ext.checkpoint.export_safetensors writes any model"
        )
    values: dict[str, Any] = model.config.to_dict()
    take_record(values)
    return values


def _facts_of_layers(state: ModelState, family: Family) -> tuple[dict[str, Any], Numbers]:
    """(what all MoE layers are, by the names of Family.config; their numbers in the decoder)."""
    if not state.layers:
        raise CheckpointError(
            "the model has no FMoETransformerMLP: fmoefy it, or import_model() a Transformers MoE model; a model of "
            "Transformers alone is saved by its save_pretrained"
        )
    numbers: dict[int, str] = {}
    for name, layer in state.layers.items():
        _check_computes(name, layer, family)
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or number in numbers:
            raise CheckpointError(f"{name or '(root)'} is not the one MoE layer of a numbered decoder layer")
        numbers[number] = name
    (first, layer), *others = state.layers.items()
    facts = _facts(layer)
    for name, other in others:
        theirs = _facts(other)
        for fact in facts.keys() | theirs.keys():
            if facts.get(fact) != theirs.get(fact):
                raise CheckpointError(
                    f"{first} has {fact}={facts.get(fact)} and {name} has {fact}={theirs.get(fact)}, but config.json "
                    "says one value for all layers"
                )
    return facts, tuple(sorted(numbers))


def _facts(layer: Any) -> dict[str, Any]:
    shared = layer.shared_experts
    return {
        "num_experts": layer.num_experts,
        "d_hidden": layer.experts.h4toh.weight.shape[2],
        "shared": 0 if shared is None else shared.mlp.h4toh.weight.shape[2],
        "shared_expert_gate": shared is not None and shared.gate is not None,
        **routing_of(layer),
    }


def _check_computes(name: str, layer: FMoE, family: Family) -> None:
    """CheckpointError where a layer is not what a format's tensors and configuration can say."""
    where = name or "(root)"
    if not isinstance(layer, FMoETransformerMLP) or type(layer.experts) is not FusedExperts:
        raise CheckpointError(
            f"{where} has experts of its own ({type(layer.experts).__name__}), no format has a place for "
            "them: FMoETransformerMLP's are two-layer MLPs"
        )
    for method in METHODS:
        if getattr(type(layer), method) is not getattr(FMoETransformerMLP, method):
            raise CheckpointError(f"{where} ({type(layer).__name__}) has its own {method}()")
    if layer.mask is not None:
        raise CheckpointError(f"{where} has mask=: no format says which tokens go to no expert")
    shared = layer.shared_experts
    if shared is not None and type(shared) is not SharedExperts:
        raise CheckpointError(f"{where} has shared experts of its own ({type(shared).__name__})")
    if shared is not None and family.files.shared and not family.files.shared_gate and shared.gate:
        raise CheckpointError(f"{where} has gated shared experts, those of {family.name} have no gate")
    check_writable({name: routing_of(layer)}, name, family.name)


def _make_config(family: Family, values: dict[str, Any], facts: dict[str, Any], moe_layers: Numbers) -> Any:
    """The configuration of a format for a model; values: those of the model's own, as its config.json has them.

    CheckpointError for models whose other parts the format does not compute.
    """
    from transformers import AutoConfig

    source = values["model_type"]
    if source not in family.holds:
        way_out = ", ".join(formats_for(source)) or (
            "none of the formats: its save_pretrained writes a folder for "
            "fmoe_ext.integrations.huggingface.from_pretrained"
        )
        raise CheckpointError(
            f"{family.name} holds models of {', '.join(family.holds)}, but this one is {source}: its attention, norms "
            f"or embeddings are others. For {source} there is {way_out}"
        )
    if "num_shared" in family.config:
        facts = facts | {"num_shared": _num_shared(family, facts)}
    known = (
        values if source == family.name else {**AutoConfig.for_model(family.name).to_dict(), "head_dim": None}
    )
    copied = {k: v for k, v in values.items() if k in known and k not in NOT_COPIED}
    moe = {key: facts[fact] for fact, key in family.config.items() if fact in facts}
    dense = tuple(i for i in range(values["num_hidden_layers"]) if i not in moe_layers)
    moe |= {**family.layers(family.name, moe_layers, dense), **family.extra(values, facts)}
    if facts.get("activation") in HIDDEN_ACT:
        moe["hidden_act"] = HIDDEN_ACT[facts["activation"]]
        if dense and values.get("hidden_act") != moe["hidden_act"]:
            raise CheckpointError(
                f"the dense MLPs of layers {dense} have hidden_act={values.get('hidden_act')!r} and the experts "
                f"{moe['hidden_act']!r}, but config.json says one for both"
            )
    return AutoConfig.for_model(family.name, **copied | moe)


def _num_shared(family: Family, facts: Mapping[str, Any]) -> int:
    """The number of shared experts of an expert's width."""
    number, rest = divmod(facts["shared"], facts["d_hidden"])
    if rest or number < family.fewest_shared:
        raise CheckpointError(
            f"{family.name} has shared experts, in all a multiple of an expert's width, {facts['d_hidden']}, but here "
            f"shared_expert_hidden is {facts['shared'] or None}"
        )
    return number


def _tied(state: ModelState, config: Any) -> frozenset[str]:
    """Names of tensors that are others too, if the configuration says so."""
    if not getattr(config, "tie_word_embeddings", False):
        return frozenset()
    return frozenset(name for name, value in state.tensors.items() if state.name_of(value) != name)


def _check_names(tensors: Mapping[str, StoredTensor], config: Any, model: Any, tied: frozenset[str]) -> None:
    """CheckpointError unless a model of this configuration has tensors of just these names and shapes."""
    config.architectures = [_class_of(config, model).__name__]
    with torch.device("meta"):
        target = _class_of(config, model)(config)
    expected = {name: tuple(value.shape) for name, value in target.state_dict().items() if name not in tied}
    found = {name: tensor.shape for name, tensor in tensors.items() if name not in tied}
    problems = [f"it has no {name}" for name in expected.keys() - found.keys()]
    problems += [f"{name} has no place" for name in found.keys() - expected.keys()]
    problems += [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    if problems:
        raise CheckpointError(
            f"{config.architectures[0]} cannot hold this {type(model).__name__}: {'; '.join(sorted(problems)[:5])}"
            f"{f'; {len(problems) - 5} more' if len(problems) > 5 else ''}"
        )


def _class_of(config: Any, model: Any) -> Any:
    """The class of a format for what the model is: LlamaForCausalLM -> MixtralForCausalLM."""
    import transformers

    before, after = (type(c).__name__.removesuffix("Config") for c in (model.config, config))
    name = type(model).__name__
    wanted = after + name.removeprefix(before)
    found = getattr(transformers, wanted, None) if name.startswith(before) else None
    if found is None:
        raise CheckpointError(f"Transformers has no {wanted}, which a {name} would become")
    return found
