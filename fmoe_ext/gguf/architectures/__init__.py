"""The architectures of llama.cpp that are read and written: a class each, found by being in a file here.

A file has one class with its relatives; plain.py has those that differ by their keys alone.
"""

import importlib
import pkgutil

from fmoe_ext.gguf.architecture import Architecture

_MODULES = tuple(
    importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
)
_FOUND = tuple(
    value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, Architecture) and value.__module__ == module.__name__
)
# Of several for one name in files, which stand in one file in this order, the first that accepts a file's keys reads
# it, or the last
ARCHITECTURES: tuple[type[Architecture], ...] = tuple(sorted(_FOUND, key=lambda kind: kind.name))
