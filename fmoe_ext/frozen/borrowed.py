"""frozen_mlp over weights that are borrowed for a forward, and once more for its backward."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.frozen.quantized import Quantized, gates_first
from fmoe_ext.ops.activations import activation_number
from fmoe_ext.ops.batch_invariant import batch_invariant, is_batch_invariant


@dataclass(frozen=True)
class Borrowed:
    """The weights of one call. forward, backward: give (w1, w2), float or Quantized, which nothing keeps afterwards.

    offs [E]: ends of the experts' rows. activation: of frozen_mlp. scales: of the adapters of w1 and w2.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    offs: Tensor
    activation: str
    scales: tuple[float, float]


def frozen_mlp_borrowing(
    weights: Borrowed,
    x_rows: Tensor,
    row_weights: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    a2: Tensor | None,
    b2: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
) -> Tensor:
    """Rows [R, D] of experts, each times its weight [R, 1]: frozen_mlp(combine=False) for rows in the experts' order.

    a1, b1, a2, b2: of the adapters. Raises RuntimeError for biases that require a gradient.
    """
    tensors = x_rows, row_weights, a1, b1, a2, b2, bias1, bias2
    if torch.is_grad_enabled() and any(b is not None and b.requires_grad for b in (bias1, bias2)):
        raise RuntimeError("biases of streamed experts are frozen: leave them out of what is trained")
    rows: Tensor = _Rows.apply(weights, torch.is_grad_enabled(), *tensors)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Borrowed, save: bool, *tensors: Any) -> Tensor:
        x, row_weights, *adapters, b1, b2 = tensors
        routing, given, packing, low, options = _arguments(
            weights, weights.forward(), x, adapters, b1, b2, save
        )
        out = torch.ops.fmoe_ext.frozen_mlp(
            x, routing, given, packing, *low, list(weights.scales), row_weights, options
        )
        ctx.weights, ctx.is_batch_invariant = weights, is_batch_invariant()
        ctx.save_for_backward(*tensors, *out[1:])
        return out[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, row_weights, a1, lb1, a2, lb2, b1, b2, *kept = ctx.saved_tensors
        weights = ctx.weights
        given = weights.backward(), x, (a1, lb1, a2, lb2), b1, b2, True
        routing, both, packing, low, options = _arguments(weights, *given)
        of_x, of_weights, *of_adapters = wanted = ctx.needs_input_grad[2:8]
        needs = [of_x, *of_adapters, of_weights]
        arguments = grads[0], x, routing, both, packing, *low, list(weights.scales), row_weights, kept
        with batch_invariant() if ctx.is_batch_invariant else nullcontext():
            dx, *found, dweights = torch.ops.fmoe_ext.frozen_mlp_backward(*arguments, options, needs)
        is_interleaved = options[4]
        if is_interleaved and of_adapters[1]:
            found[1] = _alternating(found[1])
        results = (g if w else None for g, w in zip((dx, dweights, *found), wanted, strict=True))
        return None, None, *results, None, None


def _arguments(
    call: Borrowed, weights: Any, x: Tensor, adapters: Sequence[Any], b1: Any, b2: Any, save: bool
) -> tuple[Any, ...]:
    """Routing, weights, packing, adapters and options of the operator."""
    w1, w2 = weights
    data1, scale1, zero1, format1, interleaved = _of(w1)
    data2, scale2, zero2, format2, _ = _of(w2)
    low = list(adapters)
    if interleaved:
        b1 = None if b1 is None else gates_first(b1)
        low[1] = None if low[1] is None else gates_first(low[1])
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    routing = [rows, rows[:, None], call.offs]
    options = [activation_number(call.activation), 0, int(save), format1, int(interleaved), format2]
    return routing, [data1, b1, data2, b2], [scale1, zero1, scale2, zero2], low, options


def _of(weight: Any) -> tuple[Any, ...]:
    if isinstance(weight, Quantized):
        return weight.rows(), *weight.packing()
    return weight, None, None, 0, False


def _alternating(rows: Tensor) -> Tensor:
    """The inverse of gates_first."""
    gates, ups = rows.chunk(2, 1)
    return torch.stack((gates, ups), 2).flatten(1, 2)
