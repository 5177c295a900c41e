"""Ask whether an object is of a class of PyTorch's or DeepSpeed's sharding, without importing it, which takes a second.

An object of the class can exist only if its module has been imported: so it is looked up in sys.modules.
"""

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    return _is("torch.distributed.tensor", "DTensor", x)


def is_fsdp_module(x: object) -> TypeGuard[Any]:
    return _is("torch.distributed.fsdp", "FSDPModule", x)


def is_deepspeed_engine(x: object) -> TypeGuard[Any]:
    return _is("deepspeed.runtime.engine", "DeepSpeedEngine", x)


def is_zero_redundancy(x: object) -> bool:
    """Return whether x is a ZeroRedundancyOptimizer, whose state is not in x.state but in an optimizer inside it."""
    return _is("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", x)


def _is(module: str, name: str, x: object) -> bool:
    kind: Any = getattr(sys.modules.get(module), name, None)  # None also while the module is being imported
    return kind is not None and isinstance(x, kind)
