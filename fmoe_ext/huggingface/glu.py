"""The clamped gated activations of Transformers' experts as one operator each way: GPT-OSS, DeepSeek-V4 and others.

Which options of the operator a class of experts computes with is not read from its code, which changes from release to
release: its _apply_gate runs once on numbers, in float64, and the options that give the same results are taken.
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
Options: TypeAlias = tuple[float, float, float, bool, bool]
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")  # attributes of experts


def apply_gate(experts: Any, h: torch.Tensor) -> torch.Tensor:
    """experts._apply_gate(h): h [R, 2H] -> [R, H], by ops.clamped_glu where that computes the same."""
    options = glu_options(experts) if h.device.type == "cpu" else None
    if options is None:
        gated: torch.Tensor = experts._apply_gate(h)
        return gated
    alpha, limit, offset, interleaved, clamps_activated = options
    return ops.clamped_glu(
        h, alpha, limit, offset, interleaved=interleaved, clamps_activated=clamps_activated
    )


def glu_options(experts: Any) -> Options | None:
    """The options with which ops.clamped_glu computes experts._apply_gate; None if there are none.

    The first call for a class and its numbers compares the two in float64.
    """
    if "_apply_gate" in vars(experts):  # a gate of this module alone
        return None
    act_fn = getattr(experts, "act_fn", None)
    numbers = [
        next((getattr(experts, name) for name in names if hasattr(experts, name)), None)
        for names in (ALPHAS, LIMITS)
    ]
    if not all(isinstance(number, (int, float, type(None))) for number in numbers):
        return None
    return _found(type(experts), *numbers, type(act_fn) if isinstance(act_fn, nn.Module) else None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no types for it
def _found(
    experts: type[Any], alpha: float | None, limit: float | None, act_fn: type[nn.Module] | None
) -> Options | None:
    found: Options | None = _compare(experts, alpha, limit, act_fn)  # type: ignore[arg-type]  # classes are hashable
    return found


@lru_cache(maxsize=64)
@torch.no_grad()
def _compare(
    experts: type[Any], alpha: float | None, limit: float | None, act_fn: type[nn.Module] | None
) -> Options | None:
    bare: Any = object.__new__(experts)
    nn.Module.__init__(bare)
    vars(bare).update(dict.fromkeys(ALPHAS, alpha), **dict.fromkeys(LIMITS, limit))
    alphas, limits = {1.0, alpha or 1.0}, {math.inf, math.inf if limit is None else limit}
    size = 3 * max([4.0, *filter(math.isfinite, limits)])  # beyond what is clamped
    probe = torch.linspace(-size, size, 1024, dtype=torch.float64, device="cpu")
    probe = probe[torch.arange(1024, device="cpu") * 389 % 1024].reshape(8, 128)  # each gate meets another up
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
