"""clamped_glu: the gated activations with clamps of GPT-OSS and others, one operator each way on CPUs.

    gate = min(gate, limit); up = min(max(up, -limit), limit); result = gate * sigmoid(alpha * gate) * (up + offset)

In PyTorch these are several operators, each of which writes a tensor [..., H], and some of which keep one.
"""

import math
from typing import Any

import torch

from fmoe_ext.ops._autograd import (
    call,
    register_autograd,
    register_fake,
    register_not_differentiable,
)
from fmoe_ext.ops.activations import clamp_above, clamp_both


def clamped_glu(
    h: torch.Tensor,
    alpha: float = 1.0,
    limit: float = math.inf,
    offset: float = 0.0,
    *,
    interleaved: bool = False,
    clamps_activated: bool = False,
) -> torch.Tensor:
    """Compute a gated activation with clamps: h [..., 2H], gate before up -> [..., H] of the dtype of h.

    h: float64, float32, bfloat16 or float16. alpha: of the curve x * sigmoid(alpha * x); limit: clamps the gate from
    above and up on both sides; offset: added to up. interleaved: gate and up take turns in h, as in GPT-OSS.
    clamps_activated: the activated gate is clamped, in place of the gate (Step 3.7). Computed in float32 (float64:
    float64) and rounded once. Raises RuntimeError for an odd width or a negative limit, and for a second derivative
    on the CPU. PyTorch computes it on other devices. At the limit itself the gradient is that below it, whatever
    torch.clamp's is (1 up to torch 2.13, 0 since).
    Equivalent to: clamped_glu_ref. GPT-OSS and MiniMax-M3 (1.702, 7, 1), DeepSeek-V4, GLM-5 and Hy4 (1, limit, 0).
    """
    options = (alpha, limit, offset, interleaved, clamps_activated)
    # for every device: the operator, which checks too, runs on the CPU alone
    if not h.is_floating_point():
        raise RuntimeError(f"h must be float64, float32, bfloat16 or float16, but is {h.dtype}")
    if not h.dim() or h.shape[-1] % 2:
        raise RuntimeError(f"h must have shape [R, 2 H], but got shape {list(h.shape)}")
    if not limit >= 0:
        raise RuntimeError(f"limit must be at least 0, but got {limit}")
    if h.device.type not in ("cpu", "meta"):
        return clamped_glu_ref(h, *options)
    in_rows = h.reshape(math.prod(h.shape[:-1]), h.shape[-1])
    rows: torch.Tensor = call("fmoe_ext::clamped_glu", in_rows, *map(float, options[:3]), *options[3:])
    return rows.reshape(*h.shape[:-1], rows.shape[-1])


def clamped_glu_ref(
    h: torch.Tensor,
    alpha: float = 1.0,
    limit: float = math.inf,
    offset: float = 0.0,
    interleaved: bool = False,
    clamps_activated: bool = False,
) -> torch.Tensor:
    """Compute clamped_glu in plain PyTorch: its oracle."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    gate, up = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    if not clamps_activated:
        gate = clamp_above(gate, limit)
    gate = gate * torch.sigmoid(alpha * gate)
    if clamps_activated:
        gate = clamp_above(gate, limit)
    return (gate * (clamp_both(up, limit) + offset)).to(h.dtype)


@register_fake("fmoe_ext::clamped_glu", h=2)
def _(
    h: torch.Tensor, alpha: float, limit: float, offset: float, interleaved: bool, clamps_activated: bool
) -> torch.Tensor:
    if h.shape[1] % 2:
        raise RuntimeError(f"h must have shape [R, 2 H], but got shape {list(h.shape)}")
    return h.new_empty((h.shape[0], h.shape[1] // 2))


@register_fake("fmoe_ext::clamped_glu_backward", grad=2, h=2)
def _(
    grad: torch.Tensor,
    h: torch.Tensor,
    alpha: float,
    limit: float,
    offset: float,
    interleaved: bool,
    clamps_activated: bool,
) -> torch.Tensor:
    return torch.empty_like(h, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.options = inputs[1:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (h,) = ctx.saved_tensors
    return call("fmoe_ext::clamped_glu_backward", grad, h, *ctx.options), None, None, None, None, None


register_autograd("fmoe_ext::clamped_glu", _backward, _setup, places=(0,))
register_not_differentiable("fmoe_ext::clamped_glu_backward")
