"""Collect the known Hugging Face MoE families: FAMILIES of every file in this folder.

A file has one kind of MoE layer and the model types that are variants of it; plain.py has those that need no code of
their own, family.py says what a family is, and refused.py has types that are not read. docs/formats.md has the table.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.families.family import Family, Layout

_MODULES = tuple(
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name not in ("family", "refused")
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in sorted(
            (family for module in _MODULES for family in module.FAMILIES), key=lambda family: family.name
        )
    }
)
# How files name and shape the tensors; "fused" as modules of Transformers have them
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"fused": Layout(), **{name: family.files for name, family in FAMILIES.items()}}
)

# Every layout that is known, of files and of modules: a state dict does not say which it has
_KNOWN = tuple(chain.from_iterable((family.files, family.in_modules) for family in FAMILIES.values()))


def names_of(field: str) -> list[Any]:
    """Return every value that a field has in a known layout, except "" and None."""
    return sorted({getattr(layout, field) for layout in _KNOWN} - {"", None})


GATE_NAMES = tuple(names_of("gate"))
BLOCKS = tuple(names_of("block"))
PER_EXPERT = tuple(names_of("per_expert"))
STACKED = tuple(sorted({layout.experts for layout in _KNOWN if layout.gated}))
UNGATED = tuple(sorted({layout.experts for layout in _KNOWN if not layout.gated}))
# Three weights first: two of them look like experts without a gate
SHARED_NAMES = tuple(sorted(names_of("shared_names"), key=lambda names: (-len(names), names)))
# {gate: our layer in the decoder layer} of layouts whose tensors are a decoder layer's
PLACES = MappingProxyType({layout.gate: layout.place for layout in _KNOWN if layout.place})


def formats_for(model_type: str) -> tuple[str, ...]:
    """Return the families that hold models of a type, once their MLPs are MoE layers."""
    return tuple(name for name, family in FAMILIES.items() if model_type in family.holds)
