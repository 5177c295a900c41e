"""frozen_mlp over weights that are borrowed for a forward, and borrowed again for its backward (finetune/streaming).

A streamed model reads the experts' weights into a buffer that the next layer overwrites. A weight that autograd saved
would have to stay there until the backward, as would the whole buffer. So this autograd function saves rows, adapters
and what the operator keeps (the pre-activation, the adapters' rank rows), and asks for the weights again in the
backward: a weight is read twice, and no layer keeps its weights.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.frozen.frozen_mlp import operands
from fmoe_ext.ops.activations import activation_number
from fmoe_ext.ops.batch_invariant import batch_invariant_kernels, is_batch_invariant


@dataclass(frozen=True)
class Borrowed:
    """The weights of one call."""

    forward: Callable[[], Any]  # -> (w1, w2), float or Quantized, which nothing keeps afterwards
    backward: Callable[[], Any]  # the same, for the backward
    offs: Tensor  # [E]: ends of the experts' rows
    activation: str  # of frozen_mlp
    scales: tuple[float, float]  # of the adapters of w1 and w2


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
    """Compute experts' rows [R, D] times their weights [R, 1]: frozen_mlp(combine=False) of rows in the experts' order.

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
        x, row_weights, a1, lb1, a2, lb2, b1, b2 = tensors
        w1, w2 = weights.forward()
        w1, packing1, b1, lb1 = operands(w1, b1, lb1)
        w2, packing2 = operands(w2)
        y, *kept = torch.ops.fmoe_ext.frozen_mlp(
            x, *_in_order(x), weights.offs, w1, b1, w2, b2, row_weights,
            activation_number(weights.activation), False, save, *packing1, *packing2[:3],
            a1, lb1, weights.scales[0], a2, lb2, weights.scales[1],
        )  # fmt: skip
        ctx.weights, ctx.is_batch_invariant = weights, is_batch_invariant()
        ctx.save_for_backward(*tensors, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, row_weights, a1, lb1, a2, lb2, _, b2, h, u1, u2 = ctx.saved_tensors
        weights = ctx.weights
        w1, w2 = weights.backward()
        w1, packing1, lb1 = operands(w1, lb1)
        w2, packing2 = operands(w2)
        of_x, of_weights, *of_adapters = wanted = ctx.needs_input_grad[2:8]
        with batch_invariant_kernels() if ctx.is_batch_invariant else nullcontext():
            dx, *found, dweights = torch.ops.fmoe_ext.frozen_mlp_backward(
                grads[0], x, *_in_order(x), weights.offs, w1, w2, b2, row_weights, h, u1, u2,
                activation_number(weights.activation), False, [of_x, *of_adapters, of_weights],
                *packing1, *packing2[:3], a1, lb1, weights.scales[0], a2, lb2, weights.scales[1],
            )  # fmt: skip
        is_interleaved = packing1[3]
        if is_interleaved and of_adapters[1]:
            # b of w1 went in with gates first: back to gate, up, gate, up, ...
            found[1] = torch.stack(found[1].chunk(2, 1), 2).flatten(1, 2)
        results = (g if w else None for g, w in zip((dx, dweights, *found), wanted, strict=True))
        return None, None, *results, None, None


def _in_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """Make row_idx and inverse for rows that are in the experts' order, with one choice each: the identity."""
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return rows, rows[:, None]
