"""FastMoE's module tree on top of fmoe_ext: `import fmoe_ext.compat as fmoe`, or install() and `import fmoe`.

Thin translations of names and arguments; docs/fastmoe.md lists the intended differences. Modules of FastMoE that have
no file here are made from a table, _tree.py.
"""

import importlib
import sys
from types import ModuleType

from fmoe_ext.compat import functions, megatron
from fmoe_ext.compat._tree import TREE
from fmoe_ext.compat.layers import (
    DistributedGroupedDataParallel,
    FMoE,
    FMoELinear,
    FMoETransformerMLP,
)


def install() -> None:
    """Make `import fmoe` and every submodule of it mean this package, for programs written for FastMoE.

    Raises RuntimeError if another fmoe was imported before. Calling it again does nothing.
    """
    present = sys.modules.get("fmoe")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            f"another fmoe is already imported, from {getattr(present, '__file__', None)}: call "
            "fmoe_ext.compat.install() before the first `import fmoe`, or uninstall FastMoE"
        )
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{__name__}."):
            sys.modules[f"fmoe{name.removeprefix(__name__)}"] = module


def _make_modules() -> None:
    """Make the modules of TREE, each an attribute of the module above it."""
    for path, (source, names) in TREE.items():
        module = ModuleType(f"{__name__}.{path}", f"fmoe.{path}.")
        module.__path__ = []  # a package, which may have modules
        home = importlib.import_module(f"{__name__}.{source}")
        vars(module).update({name: getattr(home, name) for name in names.split()})
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)


_make_modules()

__all__ = [
    "DistributedGroupedDataParallel",
    "FMoE",
    "FMoELinear",
    "FMoETransformerMLP",
    "functions",
    "install",
    "megatron",
]
