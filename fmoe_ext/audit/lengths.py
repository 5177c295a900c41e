"""Lengths of texts at which a model of Transformers computes otherwise: windows, chunks, rotary positions.

A shorter text says nothing about longer ones: audit_rollout() has a text pass such a length, or names it. Rotary
positions are asked: the registry of Transformers has a function for each type, which is given shorter and longer texts
until its frequencies change. Other lengths are read from fields of the configuration and attributes of modules by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_LONGEST = 1 << 24  # tokens
# names of fields and attributes that hold a length, and parts of names that hold none
_NAMES = re.compile(r"window|chunk|block_size|segment|dense_len|index_topk|compress")
_NO_LENGTHS = re.compile(r"layer|pattern|ind(ex|ic)es|blocks|types|dim")  # as max_window_layers


def lengths_that_matter(model: nn.Module) -> dict[int, str]:
    """Return {length: what changes in longer texts}, of all lengths that can be found."""
    config: Any = model.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: dict[int, list[str]] = {}
    for length, what in (*_of_rotary_positions(config), *_by_name(config.to_dict())):
        found.setdefault(length, []).append(what)
    for module in model.modules():
        for length, what in _by_name(vars(module)):
            found.setdefault(length, []).append(what)
    return {length: " and ".join(dict.fromkeys(found[length])) for length in sorted(found)}


def _by_name(fields: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _by_name({str(key): v for key, v in value.items()})
        elif _NAMES.search(name) and not _NO_LENGTHS.search(name):
            for length in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(length, int) and not isinstance(length, bool) and 1 < length <= _LONGEST:
                    yield length, name


def _of_rotary_positions(config: Any) -> Iterator[tuple[int, str]]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = {
        name: value for name, value in rope.items() if isinstance(value, dict)
    }  # {type of layer: parameters}
    for layer_type, parameters in (of_layers or {"": rope}).items():
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        what = f"rope of type {kind}"
        function = ROPE_INIT_FUNCTIONS.get(str(kind))
        if function is None:
            if kind != "default":  # of another library
                usual = getattr(config, "max_position_embeddings", None) or _LONGEST
                yield int(parameters.get("original_max_position_embeddings") or usual), what
            continue
        options = {"layer_type": layer_type} if layer_type else {}

        def frequencies(length: int, function: Callable[..., Any] = function, options: Any = options) -> Any:
            return function(config, torch.device("cpu"), seq_len=length, **options)[0]

        if torch.equal(frequencies(1), frequencies(_LONGEST)):
            continue
        low, high = 1, _LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            if torch.equal(frequencies(1), frequencies(middle)):
                low = middle
            else:
                high = middle
        yield low, what
