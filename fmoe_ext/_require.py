"""Packages that some functions need and fmoe_ext does not install: an error says how to install them."""

import importlib
from typing import Any


def require(package: str, needed_by: str, install: str = "") -> Any:
    """The imported package; ImportError if there is none. install: for pip, by default the package."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        install = install or package
        raise ImportError(f"{needed_by} needs {install} ({error}): pip install '{install}'") from error
