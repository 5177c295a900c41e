"""Parts of fmoe_ext that a build may lack."""

import importlib


def core(module, name, wanted_by):
    """`name` of the module fmoe_ext.<module>; NotImplementedError, saying what is missing, where there is none."""
    try:
        return getattr(importlib.import_module(f"fmoe_ext.{module}"), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("fmoe_ext"):
            raise  # a package that the module needs
        raise NotImplementedError(
            f"{wanted_by} needs fmoe_ext.{module}.{name}, which this version of fmoe_ext does not have"
        ) from error
