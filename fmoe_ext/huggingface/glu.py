"""Compute the clamped gated activations of Transformers' experts (GPT-OSS and others) by one operator, on the CPU.

experts.py calls apply_gate() between the two products of experts that no single operator computes:

    g = min(gate, limit)        g sigmoid(alpha g) (clamp(up, -limit, limit) + offset)

They differ in alpha, limit and offset, in where gates and ups lie, and in what is clamped. The code of a class of
experts changes from release to release, so it is not read. Its _apply_gate runs once on a probe in float64, of values
up to three times the limit, each gate beside several ups; then every combination of the options of ops.clamped_glu is
tried, and the first that gives the same results is taken. Where none does, and on GPUs, the module's own code runs.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext import ops

# alpha, limit, offset, interleaved, clamps_activated of ops.clamped_glu
_Options: TypeAlias = tuple[float, float, float, bool, bool]
_ALPHAS, _LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")  # attributes of experts


def apply_gate(experts: Any, h: torch.Tensor) -> torch.Tensor:
    """Compute experts._apply_gate(h), h [R, 2H] -> [R, H], by ops.clamped_glu where that gives the same."""
    options = glu_options(experts) if h.device.type == "cpu" else None  # the operator has no CUDA kernel
    if options is None:
        gated: torch.Tensor = experts._apply_gate(h)
        return gated
    alpha, limit, offset, interleaved, clamps_activated = options
    return ops.clamped_glu(
        h, alpha, limit, offset, interleaved=interleaved, clamps_activated=clamps_activated
    )


def glu_options(experts: Any) -> _Options | None:
    """Find the options with which ops.clamped_glu computes experts._apply_gate; None if there are none.

    The first call for a class and its numbers compares the two in float64.
    """
    if "_apply_gate" in vars(experts):  # a gate of this module alone
        return None
    act_fn = getattr(experts, "act_fn", None)
    # by class and numbers, so that a model's layers are compared once
    numbers = [
        next((getattr(experts, name) for name in names if hasattr(experts, name)), None)
        for names in (_ALPHAS, _LIMITS)
    ]
    if not all(isinstance(number, (int, float, type(None))) for number in numbers):
        return None
    return _found(type(experts), *numbers, type(act_fn) if isinstance(act_fn, nn.Module) else None)


# Apart from _compare(): Dynamo looks through the wrapper of lru_cache, and would not see that the result is constant.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _found(
    experts: type[Any], alpha: float | None, limit: float | None, act_fn: type[nn.Module] | None
) -> _Options | None:
    # classes are hashable
    found: _Options | None = _compare(experts, alpha, limit, act_fn)  # type: ignore[arg-type]
    return found


@lru_cache(maxsize=64)
@torch.no_grad()
def _compare(
    experts: type[Any], alpha: float | None, limit: float | None, act_fn: type[nn.Module] | None
) -> _Options | None:
    # An instance that has only what a gate may read.
    bare: Any = object.__new__(experts)  # without its constructor, which makes the weights
    nn.Module.__init__(bare)
    vars(bare).update(dict.fromkeys(_ALPHAS, alpha), **dict.fromkeys(_LIMITS, limit))
    alphas, limits = {1.0, alpha or 1.0}, {math.inf, math.inf if limit is None else limit}
    size = 3 * max([4.0, *filter(math.isfinite, limits)])  # beyond what is clamped
    probe = torch.linspace(-size, size, 1024, dtype=torch.float64, device="cpu")
    # mixed (389 is odd, so that each index comes once): in order, a gate would have only ups of about its own value
    probe = probe[torch.arange(1024, device="cpu") * 389 % 1024].reshape(8, 128)
    try:
        if act_fn is not None:
            bare.act_fn = act_fn()
        expected = bare._apply_gate(probe)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(expected, torch.Tensor) or (expected.dtype, expected.shape) != (probe.dtype, (8, 64)):
        return None
    for options in itertools.product(alphas, limits, (0.0, 1.0), (False, True), (False, True)):
        if (ops.clamped_glu_ref(probe, *options) - expected).abs().max() <= 1e-12 * size**2:
            return options
    return None
