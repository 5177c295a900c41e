"""Tests for classes of PyTorch's and DeepSpeed's sharding that do not import their modules, which takes a second."""

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
    """True for ZeroRedundancyOptimizer, whose state is in an optimizer of its own on each rank, not in x.state."""
    return _is("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer", x)


def _is(module: str, name: str, x: object) -> bool:
    kind: Any = getattr(sys.modules.get(module), name, None)  # None also while the module is being imported
    return kind is not None and isinstance(x, kind)
