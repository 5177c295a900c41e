"""The Hugging Face MoE families that are known: a file for each kind of MoE layer, found by being here.

docs/formats.md has the table.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from fmoe_ext.checkpoint.families.family import Family, Layout

_MODULES = tuple(
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name not in ("family", "refused")
)
_FOUND = tuple(family for module in _MODULES for family in (module.FAMILY, *getattr(module, "VARIANTS", ())))
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in sorted(_FOUND, key=lambda family: family.name)}
)
# How files name and shape the tensors; "fused" as modules of Transformers have them
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"fused": Layout(), **{name: family.files for name, family in FAMILIES.items()}}
)


def formats_for(model_type: str) -> tuple[str, ...]:
    """Return the families that hold models of a type, once their MLPs are MoE layers."""
    return tuple(name for name, family in FAMILIES.items() if model_type in family.holds)
