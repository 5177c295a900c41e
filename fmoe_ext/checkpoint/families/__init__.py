"""The Hugging Face MoE families that are known: one file each, found by being here. docs/formats.md has the table."""

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from fmoe_ext.checkpoint.families.family import Family, Layout


def _families() -> dict[str, Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "family")
    return {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in names}


FAMILIES: Mapping[str, Family] = MappingProxyType(_families())
# How files name and shape the tensors; "fused" as modules of Transformers have them.
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"fused": Layout(), **{name: family.files for name, family in FAMILIES.items()}}
)


def formats_for(model_type: str) -> tuple[str, ...]:
    """The families that hold models of a type, once their MLPs are MoE layers."""
    return tuple(name for name, family in FAMILIES.items() if model_type in family.holds)
