"""Packages that some functions need and fmoe_ext does not install: an error says how to install them."""

import importlib
from types import MappingProxyType
from typing import Any

# package: the extra of pyproject.toml that brings it and what goes with it
_EXTRAS = MappingProxyType(
    {
        "transformers": "finetune",
        "peft": "finetune",
        "accelerate": "finetune",
        "aetcd": "remote",
        "prometheus_client": "remote",
    }
)


def require(package: str, needed_by: str, install: str = "") -> Any:
    """The imported package; ImportError if there is none. install: for pip, by default the package."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = install or package
        extra = f", or in a clone pip install -e '.[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
        raise ImportError(f"{needed_by} needs {install} ({error}): pip install '{install}'{extra}") from error
