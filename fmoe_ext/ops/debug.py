"""FMOE_DEBUG=1: on CUDA, too, an index out of range raises, at the price of a synchronisation a call."""

from collections.abc import Callable
from typing import Any

import torch

from fmoe_ext import _env


def wanted(t: Any) -> bool:
    """Whether the values of the indices that go with t are to be checked; what is no tensor, the operator rejects."""
    return bool(getattr(t, "is_cuda", False) and not torch.compiler.is_compiling() and _env.get("FMOE_DEBUG"))


def check(op: Callable[..., Any], *args: Any) -> None:
    """Runs op on CPU copies of args, of which the caller cuts all that is no index to width 0: what is wrong raises."""
    with torch.no_grad():
        op(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args))
