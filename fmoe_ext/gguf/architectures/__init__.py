"""Collect the architectures of llama.cpp that are read and written: every Architecture class in a file here.

A file has one class and its relatives; plain.py has those that differ by their keys alone.
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
# Several classes may have one name in files. Then they stand in one module, and the first that accepts a file's keys
# reads it, or the last; sorted() keeps their order
ARCHITECTURES: tuple[type[Architecture], ...] = tuple(sorted(_FOUND, key=lambda kind: kind.name))
