"""List the activations of expert_mlp: the one list from which every other in Python is made.

An activation is a curve f, a function of one number, and is gated or not:
    plain   h [R, H]              -> f(h)
    gated   h [R, 2 H] = gate, up -> f(gate) * up

A new one is an entry of KINDS, and of CURVES if its curve is new; the lists of plain and of gated ones, and their names
in a config.json, follow from these. tests/ops/test_activations.py compares it with csrc/activation.h and
fmoe_ext/include/fmoe/ops.h.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
CLAMPED = "clamped_silu"  # the curve of GPT-OSS, whose other factor is up clamped to [-7, 7], plus 1


class _Curve(NamedTuple):
    """A function of one number, and backward(grad, h): grad times its derivative at h."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]


def clamp_above(x: Tensor, limit: float) -> Tensor:
    """Clamp from above, with gradient 1 where x is limit as in the kernels (torch's clamp has 0 there since 2.14)."""
    return x.masked_fill(x > limit, limit)


def clamp_both(x: Tensor, limit: float) -> Tensor:
    """Clamp to [-limit, limit], with gradient 1 where x is limit or -limit, as clamp_above."""
    return clamp_above(x, limit).masked_fill(x < -limit, -limit)


def _clamped_silu(gate: Tensor) -> Tensor:
    gate = clamp_above(gate, 7.0)
    return gate * torch.sigmoid(1.702 * gate)


def _clamped_silu_backward(grad: Tensor, gate: Tensor) -> Tensor:
    clamped = gate.clamp(max=7.0)
    s = torch.sigmoid(1.702 * clamped)
    return grad * (s * (1 + 1.702 * clamped * (1 - s)) * (gate <= 7.0))


# {name in CurveKind of csrc/activation.h: the curve}
CURVES: Mapping[str, _Curve] = MappingProxyType(
    {
        "gelu": _Curve(F.gelu, aten.gelu_backward),
        "gelu_tanh": _Curve(
            lambda h: F.gelu(h, approximate="tanh"),
            lambda grad, h: aten.gelu_backward(grad, h, approximate="tanh"),
        ),
        "relu": _Curve(F.relu, lambda grad, h: aten.threshold_backward(grad, h, 0)),
        "silu": _Curve(F.silu, aten.silu_backward),
        "relu2": _Curve(lambda h: F.relu(h).square(), lambda grad, h: grad * (2 * F.relu(h))),
        CLAMPED: _Curve(_clamped_silu, _clamped_silu_backward),
    }
)


class _Kind(NamedTuple):
    """An activation of the list KINDS."""

    name: str
    curve: str  # of CURVES; a plain activation has its curve's name
    gated: bool  # h is [gate, up], and the result curve(gate) * up


# The operators know an activation by its place here.
KINDS = (
    _Kind("gelu", "gelu", gated=False),
    _Kind("gelu_tanh", "gelu_tanh", gated=False),
    _Kind("relu", "relu", gated=False),
    _Kind("silu", "silu", gated=False),
    _Kind("swiglu", "silu", gated=True),
    _Kind("geglu", "gelu", gated=True),
    _Kind("geglu_tanh", "gelu_tanh", gated=True),
    _Kind("relu2", "relu2", gated=False),
    _Kind("clamped_swiglu", CLAMPED, gated=True),
)


def _function(kind: _Kind) -> Callable[..., Tensor]:
    """Make the function h -> activated of an activation."""
    forward = CURVES[kind.curve].forward
    if not kind.gated:
        return forward
    if kind.curve == CLAMPED:
        return _clamped_swiglu
    return lambda h: forward(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]


def _clamped_swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    gate = clamp_above(gate, 7.0)
    # in this order, as experts.ClampedSwiGLU: _clamped_silu(gate) * (up + 1) has other bits
    return (clamp_both(up, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


FUNCTIONS = tuple(_function(kind) for kind in KINDS)
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {kind.name: function for kind, function in zip(KINDS, FUNCTIONS, strict=True)}
)
GATED_ACTIVATIONS = tuple(kind.name for kind in KINDS if kind.gated)
PLAIN_ACTIVATIONS = tuple(kind.name for kind in KINDS if not kind.gated)
_NAMES = tuple(ACTIVATIONS)  # torch.compile breaks the graph at a mapping proxy


def activation_number(name: str) -> int:
    """Return the number of an activation in the operators' schemas; RuntimeError for one that is not in ACTIVATIONS."""
    if name not in _NAMES:
        raise RuntimeError(f'unknown activation "{name}": known are {", ".join(_NAMES)}')
    return _NAMES.index(name)
