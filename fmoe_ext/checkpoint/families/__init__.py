"""The Hugging Face MoE families that are known: a file for each kind of MoE layer, found by being here.

docs/formats.md has the table.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from fmoe_ext.checkpoint.families.family import Family, Layout


def _families() -> dict[str, Family]:
    names = (
        module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("family", "refused")
    )
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [family for module in modules for family in (module.FAMILY, *getattr(module, "VARIANTS", ()))]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


FAMILIES: Mapping[str, Family] = MappingProxyType(_families())
# How files name and shape the tensors; "fused" as modules of Transformers have them.
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"fused": Layout(), **{name: family.files for name, family in FAMILIES.items()}}
)


def formats_for(model_type: str) -> tuple[str, ...]:
    """The families that hold models of a type, once their MLPs are MoE layers."""
    return tuple(name for name, family in FAMILIES.items() if model_type in family.holds)
