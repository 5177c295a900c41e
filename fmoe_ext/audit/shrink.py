"""Shrink a configuration of Transformers, so that the audit and the doctor take seconds for a model of it.

A small model must be one of the same kind. So one layer of each kind stays. Two layers are alike if they agree in every
list of the configuration that has one entry for each layer, in every known field that lists or counts layers
(_CHOSEN_LAYERS, _FIRST_LAYERS, _LAST_LAYERS), and in all attributes of their own (per_layer_config). Kinds that a model
computes from a layer's number show when both models are built: if one is lost, all layers up to its first one stay.

A size that differs between layers keeps differing, in the same order, and a layer that takes its keys and values from
another keeps that one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.checkpoint.families import FAMILIES


def _names(fact: str) -> list[str]:
    """List the names that configurations of the known families have for a number."""
    return sorted({family.config[fact] for family in FAMILIES.values() if fact in family.config})


# What each size becomes where it is larger; where layers differ, the smallest of their values (which so may grow).
SIZES = MappingProxyType(
    {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "vocab_size": 64,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "max_position_embeddings": 64,
        # as the known families call them, and others beside
        **dict.fromkeys((*_names("num_experts"), "num_routed_experts", "moe_num_routed_experts"), 4),
        **dict.fromkeys((*_names("top_k"), "moe_top_k"), 2),
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "sliding_window": 16,
    }
)
# Fields that hold the same size for some of the layers.
_SAME_SIZE = MappingProxyType(
    {
        "head_dim": ("swa_head_dim",),
        "v_head_dim": ("swa_v_head_dim",),
        "num_attention_heads": (
            "swa_num_attention_heads",
            "num_sliding_attention_heads",
            "num_attention_heads_per_layer",
        ),
        "num_key_value_heads": ("swa_num_key_value_heads", "num_key_value_heads_per_layer"),
    }
)
_LAYERS = 2  # at least, where one kind is all
_MOST_LAYERS = 8  # kinds, and layers that begin the model
# Fields that list some layers by their numbers.
_CHOSEN_LAYERS = (
    *("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices", "local_layer_ids"),
    *("ple_layer_ids", "cross_attention_layers"),
)
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")  # how many at the beginning are special
_LAST_LAYERS = ("num_kv_shared_layers",)  # how many at the end
_SOURCE_LAYERS = "kv_source_layers"  # for each layer the one whose keys and values it takes
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # those beyond the small vocabulary are taken out


def shrunk_config(config: Any, build: Callable[[Any], nn.Module] | None = None) -> Any:
    """Return a copy with small sizes (SIZES) and one layer of each kind.

    Sizes that differ between layers stay different, in the same order: the smallest becomes what SIZES
    says, the next one twice that. build: configuration -> model, called on the meta device to compare the layers of
    the large and the small model; without it, kinds that no list of the configuration shows may be lost. Raises
    AuditError for more than _MOST_LAYERS kinds, and for layers that stay lost with that many layers.
    """
    small = _with_first_layers(config, 0)
    if build is None:
        return small
    layers = _layers_of(build, config)
    lost = _lost_layers(layers, _layers_of(build, small))
    if not lost:
        return small
    # A model may compute the kind of a layer from its number (decoder_sparse_step, attn_layer_period): layers that
    # begin the large model have the same numbers in the small one.
    needed = 1 + max(lost.values())
    if needed <= _MOST_LAYERS:
        small = _with_first_layers(config, needed)
        lost = _lost_layers(layers, _layers_of(build, small))
    if lost:
        kinds = []
        for (name, kind), first in lost.items():
            others = kind - frozenset.intersection(*layers[name])  # what not every layer has
            kinds.append(f"{name}.{first} with {', '.join(sorted(others))}")
        raise AuditError(
            f"a small model of {type(config).__name__} has at most {_MOST_LAYERS} layers and would lose "
            f"{'; '.join(kinds)}: give file.py:function that builds one"
        )
    return small


def _layers_of(build: Callable[[Any], nn.Module], config: Any) -> dict[str, list[frozenset[str]]]:
    """Build a model without memory -> {name of a list of layers: for each layer the classes of its modules}."""
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = "eager"  # as in the small one
    with torch.device("meta"):
        model = build(config)
    layers: dict[str, list[frozenset[str]]] = {}
    for name, module in model.named_modules():
        # lists in a layer, of experts say, count as parts of the layer
        if isinstance(module, nn.ModuleList) and not name.startswith(tuple(f"{outer}." for outer in layers)):
            layers[name] = [frozenset(type(part).__name__ for part in layer.modules()) for layer in module]
    return layers


def _lost_layers(
    large: dict[str, list[frozenset[str]]], small: dict[str, list[frozenset[str]]]
) -> dict[tuple[str, frozenset[str]], int]:
    """Find the kinds that the small model lacks -> {(list, kind): number of its first layer in the large one}."""
    return {
        (name, kind): kinds.index(kind)
        for name, kinds in large.items()
        for kind in kinds
        if kind not in small.get(name, [])
    }


def _with_first_layers(config: Any, num_first: int) -> Any:
    """Return a small copy with the first layer of each kind that the configuration shows, and the first num_first."""
    small = copy.deepcopy(config)
    # For each layer the attributes that are its own (Transformers' per_layer_config); empty if there are none.
    overrides: list[dict[str, Any]] = []
    if getattr(config, "is_heterogeneous", False):
        names = sorted(config.per_layer_attributes)
        for layer in config.per_layer_config:
            own = {name: getattr(layer, name) for name in names}
            overrides.append(own | ({"skip": layer.skip} if layer.skip else {}))
        small.per_layer_config = None
    # Some models have as many heads of keys as of queries and can have no fewer; SIZES has 2 and 4.
    shares_no_heads = all(
        _of(small, layer, "num_key_value_heads", 0) == _of(small, layer, "num_attention_heads", None)
        for layer in (overrides or [{}])
    )
    if isinstance(getattr(small, "num_hidden_layers", None), int):
        overrides = _keep_layers(small, overrides, num_first)
    for name in SIZES:
        _shrink(small, name, overrides)
    for name in _TOKENS:
        token, size = getattr(small, name, None), getattr(small, "vocab_size", None)
        if isinstance(token, (list, tuple)) and size is not None:
            setattr(small, name, [one for one in token if one < size] or None)
        elif isinstance(token, int) and size is not None and token >= size:
            setattr(small, name, None)
    if shares_no_heads:
        small.num_key_value_heads = small.num_attention_heads
        for layer in overrides:
            if "num_attention_heads" in layer:
                layer["num_key_value_heads"] = layer["num_attention_heads"]
    rope = getattr(small, "rope_parameters", None)
    # mrope_section: how many frequencies belong to time, height and width; together half of a head
    if isinstance(rope, dict) and "mrope_section" in rope:
        size = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        parts = [part * half // sum(rope["mrope_section"]) for part in rope["mrope_section"]]
        rope["mrope_section"] = [*parts[:-1], parts[-1] + half - sum(parts)]
    if overrides:
        small.per_layer_config = {i: layer for i, layer in enumerate(overrides) if layer}
    if hasattr(small, "use_cache"):
        small.use_cache = False  # caches of models without attention have no length
    small._attn_implementation = "eager"  # the same sums with and without a mask
    small._experts_implementation = "eager"  # torch's grouped_mm has no float64
    return small


def _of(config: Any, layer: dict[str, Any], name: str, default: Any) -> Any:
    return layer.get(name, getattr(config, name, default))


def _keep_layers(small: Any, overrides: list[dict[str, Any]], num_first: int) -> list[dict[str, Any]]:
    """Cut the configuration to the first layer of each kind and num_first; return the kept layers' overrides."""
    layers = range(small.num_hidden_layers)
    of_layers = {
        name: list(value)
        for name, value in vars(small).items()
        if isinstance(value, (list, tuple))
        and len(value) == len(layers)
        and name not in {*_CHOSEN_LAYERS, *_TOKENS}
    }
    sources = of_layers.pop(_SOURCE_LAYERS, None)
    marks = {name: value for name, value in of_layers.items() if len({repr(entry) for entry in value}) > 1}
    marks |= {
        f"{name} of per_layer_config": [own.get(name) for own in overrides]
        for own in overrides
        for name in own
    }
    members: dict[str, set[int]] = {}  # {field: the layers that it means}
    for name in (*_CHOSEN_LAYERS, *_FIRST_LAYERS, *_LAST_LAYERS):
        value = getattr(small, name, None)
        if name in _CHOSEN_LAYERS and isinstance(value, (list, tuple)):
            members[name] = set(value) & set(layers)
        elif name not in _CHOSEN_LAYERS and isinstance(value, int):
            members[name] = set(layers[:value] if name in _FIRST_LAYERS else layers[len(layers) - value :])
    marks |= {name: [i in chosen for i in layers] for name, chosen in members.items()}
    if sources:
        marks[_SOURCE_LAYERS] = [i == source for i, source in enumerate(sources)]
    first: dict[str, int] = {}
    for i in layers:
        first.setdefault(repr([value[i] for value in marks.values()]), i)
    kept = set(first.values())  # the first layer of each kind
    if len(kept) > _MOST_LAYERS:
        raise AuditError(
            f"{type(small).__name__} has {len(kept)} kinds of layers, which differ in {', '.join(marks)}; a small "
            f"model has at most {_MOST_LAYERS} layers: give file.py:function that builds one"
        )
    kept |= set(layers[:num_first])
    if sources:
        kept |= {sources[i] for i in kept}
    kept |= set([i for i in layers if i not in kept][: max(_LAYERS - len(kept), 0)])
    new = {old: i for i, old in enumerate(sorted(kept))}
    small.num_hidden_layers = len(new)
    for name, value in of_layers.items():
        setattr(small, name, [value[i] for i in new])
    for name, chosen in members.items():
        numbers = [new[i] for i in new if i in chosen]
        setattr(small, name, numbers if name in _CHOSEN_LAYERS else len(numbers))
    if sources:
        setattr(small, _SOURCE_LAYERS, [new[sources[i]] for i in new])
    return [overrides[i] for i in new] if overrides else []


def _shrink(small: Any, name: str, overrides: list[dict[str, Any]]) -> None:
    """Make one size small wherever the configuration has it: as a number, a list of layers, or a layer's own."""
    fields, values = _sizes(small, name, overrides)
    smallest = SIZES[name]
    if name == "num_attention_heads":
        # not fewer than heads of keys, which may have stayed or doubled
        smallest = max({smallest} | _sizes(small, "num_key_value_heads", overrides)[1])
    if max(values, default=0) <= smallest:
        return
    # one value: at most SIZES; several: SIZES, twice, four times that, in their order, so that they stay different
    to = {v: min(v, smallest) if len(values) == 1 else smallest << i for i, v in enumerate(sorted(values))}
    for field in fields:
        value = getattr(small, field)
        if isinstance(value, (list, tuple)):
            setattr(small, field, [to.get(v, v) for v in value])
        elif _is_size(value):
            setattr(small, field, to[value])
    for layer in overrides:
        if _is_size(layer.get(name)):
            layer[name] = to[layer[name]]


def _sizes(small: Any, name: str, overrides: list[dict[str, Any]]) -> tuple[list[str], set[int]]:
    """Find a size -> (the fields that hold it, its values in them and in layers' own)."""
    fields = [field for field in (name, *_SAME_SIZE.get(name, ())) if getattr(small, field, None) is not None]
    values: set[int] = set()
    for field in fields:
        value = getattr(small, field)
        values |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if _is_size(v)}
    return fields, values | {layer[name] for layer in overrides if _is_size(layer.get(name))}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def vocabulary_of(config: Any, remedy: str) -> int:
    """Return vocab_size of a configuration; where it has none, raise AuditError that ends with the remedy."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise AuditError(
            f"{type(config).__name__} has no vocab_size, so that no tokens can be drawn for it: {remedy}"
        )
    return size
