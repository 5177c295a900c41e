"""Import packages that some functions need and fmoe_ext does not install; the error says how to install them."""

import importlib
from types import MappingProxyType
from typing import Any

# {package: the extra of pyproject.toml that installs it and what goes with it}
_EXTRAS = MappingProxyType(
    {
        "transformers": "finetune",
        "peft": "finetune",
        "aetcd": "remote",
        "prometheus_client": "remote",
    }
)


def require(package: str, needed_by: str, install: str = "") -> Any:
    """Import a package; ImportError if it is not there. install: what pip is to install, by default the package."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = install or package
        extra = f", or in a clone pip install -e '.[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
        raise ImportError(f"{needed_by} needs {install} ({error}): pip install '{install}'{extra}") from error
