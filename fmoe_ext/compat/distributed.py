"""fmoe.distributed."""

from fmoe_ext.compat._core import core


def __getattr__(name):
    if name == "DistributedGroupedDataParallel":
        return core("distributed", name, f"fmoe.distributed.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
