"""FastMoE's module tree on top of fmoe_ext: `import fmoe_ext.compat as fmoe`, or install() and `import fmoe`.

Thin translations of names and arguments; docs/fastmoe.md lists the intended differences. Nothing else in fmoe_ext
imports this package.
"""

import importlib
import pkgutil
import sys
from types import ModuleType

from fmoe_ext.compat.distributed import DistributedGroupedDataParallel
from fmoe_ext.compat.layers import FMoE
from fmoe_ext.compat.linear import FMoELinear
from fmoe_ext.compat.transformer import FMoETransformerMLP


def install() -> None:
    """Makes `import fmoe` and every submodule of it mean this package, for programs written for FastMoE.

    Raises RuntimeError if another fmoe was imported before. Calling it again does nothing.
    """
    present = sys.modules.get("fmoe")
    if present is not None and present is not sys.modules[__name__]:
        raise RuntimeError(
            f"another fmoe is already imported, from {getattr(present, '__file__', None)}: call "
            "fmoe_ext.compat.install() before the first `import fmoe`, or uninstall FastMoE"
        )
    sys.modules["fmoe"] = sys.modules[__name__]
    for module in pkgutil.walk_packages(__path__, __name__ + "."):
        name = "fmoe" + module.name.removeprefix(__name__)
        sys.modules[name] = importlib.import_module(module.name)


def __getattr__(name: str) -> ModuleType:
    """fmoe.gates, fmoe.functions and the others, imported when they are first asked for."""
    if any(module.name == name for module in pkgutil.iter_modules(__path__)):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["DistributedGroupedDataParallel", "FMoE", "FMoELinear", "FMoETransformerMLP", "install"]
