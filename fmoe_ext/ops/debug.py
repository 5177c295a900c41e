"""Check indices with FMOE_DEBUG=1: one out of range raises on CUDA too, at the price of a synchronisation a call."""

from collections.abc import Callable
from typing import Any

import torch

from fmoe_ext import _env


def wanted(t: Any) -> bool:
    """Return whether to check the values of the indices that go with t; the operator rejects what is no tensor."""
    return bool(
        getattr(t, "is_cuda", False)
        and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
        and _env.get("FMOE_DEBUG")
    )


def check(op: Callable[..., Any], *args: Any, cut: tuple[Any, ...] = ()) -> None:
    """Call op with copies of args on the CPU, where it reads the indices and raises.

    cut: those of args that are no indices. They are copied without their columns, which costs nothing, and in float32,
    whatever autocast makes of them. Other faults, which op finds on any device, it names for the arguments as they are.
    """
    try:
        with torch.no_grad():
            op(*(_copy(arg, any(arg is t for t in cut)) for arg in args))
        return
    except RuntimeError as error:
        found = error
    with torch.no_grad():
        op(*args)  # raises if the fault is not in the indices
    raise found


def _copy(arg: Any, is_cut: bool) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    if is_cut:
        for dim in range(1, arg.dim()):
            arg = arg.narrow(dim, 0, 0)
        arg = arg.float() if arg.is_floating_point() else arg
    return arg.cpu()
