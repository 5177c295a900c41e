"""frozen_mlp over weights that are borrowed for a forward, and borrowed again for its backward (finetune/streaming).

Where a layer is larger than its buffers, a streamed model computes it in parts, and a later part is read over an
earlier one (parts.py there; a whole layer uses hooks for saved tensors, experts.py). A weight that autograd saved would
have to stay until the backward, and with it the buffer. So _Rows saves rows, adapters and what the operator keeps (the
pre-activation, the adapters' rank rows), and asks for the weights again in the backward.

Names are those of frozen_mlp.py: b1 and b2 are biases, (a1, lb1) and (a2, lb2) the adapters of w1 and w2.
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
    """The source of the weights of one call, and what it computes with them."""

    forward: Callable[[], Any]  # -> (w1, w2), float or Quantized, which nothing keeps afterwards
    backward: Callable[[], Any]  # the same, for the backward
    offs: Tensor  # [E]: ends of the experts' rows
    activation: str  # of frozen_mlp
    scales: tuple[float, float]  # of the adapters of w1 and w2


def frozen_mlp_borrowing(
    borrowed: Borrowed,
    x_rows: Tensor,
    row_weights: Tensor,
    a1: Tensor | None,
    lb1: Tensor | None,
    a2: Tensor | None,
    lb2: Tensor | None,
    b1: Tensor | None,
    b2: Tensor | None,
) -> Tensor:
    """Compute experts of x_rows [R, D], times row_weights [R, 1]: frozen_mlp(combine=False) of rows in experts' order.

    Raises RuntimeError for biases that require a gradient.
    """
    tensors = x_rows, row_weights, a1, lb1, a2, lb2, b1, b2
    if torch.is_grad_enabled() and any(b is not None and b.requires_grad for b in (b1, b2)):
        raise RuntimeError("biases of streamed experts are frozen: leave them out of what is trained")
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    rows: Tensor = _Rows.apply(borrowed, save, *tensors)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, borrowed: Borrowed, save: bool, *tensors: Any) -> Tensor:
        x, row_weights, a1, lb1, a2, lb2, b1, b2 = tensors
        w1, w2 = borrowed.forward()
        w1, packing1, b1, lb1 = operands(w1, b1, lb1)
        w2, packing2 = operands(w2)
        y, *kept = torch.ops.fmoe_ext.frozen_mlp(
            x, *_in_order(x), borrowed.offs, w1, b1, w2, b2, row_weights,
            activation_number(borrowed.activation), False, save, *packing1, *packing2[:3],
            a1, lb1, borrowed.scales[0], a2, lb2, borrowed.scales[1],
        )  # fmt: skip
        ctx.borrowed, ctx.is_batch_invariant = borrowed, is_batch_invariant()
        ctx.save_for_backward(*tensors, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, row_weights, a1, lb1, a2, lb2, _, b2, h, u1, u2 = ctx.saved_tensors
        borrowed = ctx.borrowed
        w1, w2 = borrowed.backward()
        w1, packing1, lb1 = operands(w1, lb1)
        w2, packing2 = operands(w2)
        of_x, of_row_weights, *of_adapters = wanted = ctx.needs_input_grad[2:8]
        with batch_invariant_kernels() if ctx.is_batch_invariant else nullcontext():
            dx, *found, drow_weights = torch.ops.fmoe_ext.frozen_mlp_backward(
                grads[0], x, *_in_order(x), borrowed.offs, w1, w2, b2, row_weights, h, u1, u2,
                activation_number(borrowed.activation), False, [of_x, *of_adapters, of_row_weights],
                *packing1, *packing2[:3], a1, lb1, borrowed.scales[0], a2, lb2, borrowed.scales[1],
            )  # fmt: skip
        is_interleaved = packing1[3]
        if is_interleaved and of_adapters[1]:
            # lb1 went in with gates first: back to gate, up, gate, up, ...
            found[1] = torch.stack(found[1].chunk(2, 1), 2).flatten(1, 2)
        results = (g if w else None for g, w in zip((dx, drow_weights, *found), wanted, strict=True))
        return None, None, *results, None, None


def _in_order(x: Tensor) -> tuple[Tensor, Tensor]:
    """Make row_idx and inverse for rows that are in the experts' order, with one choice each: the identity."""
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return rows, rows[:, None]
