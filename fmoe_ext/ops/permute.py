"""permute and unpermute: copy tokens to rows in the experts' order, and sum the rows of each token.

    permute     rows[r] = x[row_idx[r] // K]                              [T, D] -> [R, D]
    unpermute   y[t] = sum_k topk_weights[t, k] * rows[inverse[t, k]]     [R, D] -> [T, D]

A row is read through row_idx, a token's rows are found through inverse (sort_tokens), so neither direction scatters and
every sum has one order. Without weights each is the other's gradient. With weights the gradient of unpermute is
unpermute_backward, whose own derivatives are made of these three operators.
"""

from typing import Any

import torch

from fmoe_ext.ops import debug
from fmoe_ext.ops._autograd import (
    call,
    keep_inputs,
    register_autograd,
    register_fake,
    register_second_derivative,
)


def permute(x: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Copy rows of x to expert-major order, bitwise; padding rows (row_idx -1) are zero.

    x [T, D] of any dtype; row_idx [R] int32 and inverse [T, K] int32 as sort_tokens returns them -> [R, D].
    Raises RuntimeError for entries of row_idx outside [-1, T * K) on the CPU; on CUDA such an entry counts as -1.
    Equivalent to: x[row_idx // K]. Its gradient is unpermute without weights. FastMoE: local_scatter.

    Example:

        >>> topk_idx = torch.tensor([[2, 0], [1, 2], [0, 2]])  # 3 tokens, 2 of 3 experts each
        >>> _, _, row_idx, inverse = fmoe_ext.ops.sort_tokens(topk_idx, num_experts=3)
        >>> permute(torch.tensor([[0.0], [1.0], [2.0]]), row_idx, inverse).flatten()
        tensor([0., 2., 1., 0., 1., 2.])
    """
    if debug.wanted(x):
        debug.check(torch.ops.fmoe_ext.permute, x, row_idx, inverse, cut=(x,))
    rows: torch.Tensor = call("fmoe_ext::permute", x, row_idx, inverse)
    return rows


def unpermute(
    y: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum the rows of each token's experts, weighted by topk_weights; dropped choices add 0.

    y [R, D] float64, float32, bfloat16 or float16; row_idx [R] and inverse [T, K] int32 as sort_tokens
    returns them, -1 for dropped choices; topk_weights [T, K] float32 or of the dtype of y
    -> [T, D], summed in float32 (float64 for float64) in the order of k.
    Raises RuntimeError for entries of inverse outside [-1, R) on the CPU; on CUDA such an entry counts as -1.
    Equivalent to: (y[inverse] * topk_weights.unsqueeze(-1)).sum(1). FastMoE: local_gather, weighted.

    Example:

        >>> topk_idx = torch.tensor([[2, 0], [1, 2], [0, 2]])  # 3 tokens, 2 of 3 experts each
        >>> _, _, row_idx, inverse = fmoe_ext.ops.sort_tokens(topk_idx, num_experts=3)
        >>> rows = torch.ones(6, 1)
        >>> unpermute(rows, row_idx, inverse, topk_weights=torch.full((3, 2), 0.5)).flatten()
        tensor([1., 1., 1.])
    """
    if debug.wanted(y):
        debug.check(torch.ops.fmoe_ext.unpermute, y, row_idx, inverse, None, cut=(y,))
    out: torch.Tensor = call("fmoe_ext::unpermute", y, row_idx, inverse, topk_weights)
    return out


def permute_ref(x: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Compute permute in plain PyTorch: its oracle."""
    padding = (row_idx < 0).unsqueeze(1)
    if row_idx.numel() == 0 or x.shape[0] == 0:
        return x.new_zeros((row_idx.shape[0], x.shape[1]))
    return x[row_idx.clamp(min=0) // inverse.shape[1]].masked_fill(padding, 0)


def unpermute_ref(
    y: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute unpermute in plain PyTorch: its oracle."""
    compute = torch.promote_types(y.dtype, torch.float32)
    padded = torch.cat([y, y.new_zeros((1, y.shape[1]))]).to(compute)  # its last row: dropped choices
    rows = padded[inverse.long()]  # [T, K, D]
    if topk_weights is not None:
        rows = rows * topk_weights.to(compute).unsqueeze(-1)
    return rows.sum(1).to(y.dtype)


@register_fake("fmoe_ext::permute", x=2, row_idx=1, inverse=2)
def _(x: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return x.new_empty((row_idx.shape[0], x.shape[1]))


@register_fake("fmoe_ext::unpermute", y=2, row_idx=1, inverse=2, topk_weights=2)
def _(
    y: torch.Tensor, row_idx: torch.Tensor, inverse: torch.Tensor, topk_weights: torch.Tensor | None
) -> torch.Tensor:
    return y.new_empty((inverse.shape[0], y.shape[1]))


@register_fake("fmoe_ext::unpermute_backward", grad_out=2, y=2, row_idx=1, inverse=2, topk_weights=2)
def _(
    grad_out: torch.Tensor,
    y: torch.Tensor | None,
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if y is None or topk_weights is None:
        grad_weights = grad_out.new_empty((0,))
    else:
        grad_weights = topk_weights.new_empty(inverse.shape)
    return grad_out.new_empty((row_idx.shape[0], grad_out.shape[1])), grad_weights


def _permute_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, row_idx, inverse = inputs
    ctx.save_for_backward(row_idx, inverse)


def _permute_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return call("fmoe_ext::unpermute", grad, *ctx.saved_tensors, None), None, None


def _unpermute_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, row_idx, inverse, topk_weights = inputs
    # y, the largest of these, is read for the gradient of the weights alone
    weights_need_grad = topk_weights is not None and topk_weights.requires_grad
    ctx.save_for_backward(y if weights_need_grad else None, row_idx, inverse, topk_weights)


def _unpermute_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    y, row_idx, inverse, topk_weights = ctx.saved_tensors
    if topk_weights is None:
        return call("fmoe_ext::permute", grad, row_idx, inverse), None, None, None
    arguments = (grad, y, row_idx, inverse, topk_weights)
    grad_y, grad_weights = call("fmoe_ext::unpermute_backward", *arguments)
    return grad_y, None, None, None if y is None else grad_weights


def _unpermute_backward_backward(
    ctx: Any, grad_grad_y: torch.Tensor, grad_grad_weights: torch.Tensor
) -> tuple[Any, ...]:
    """Differentiate by the same operators: unpermute is linear in y and in the weights.

    The first backward gave grad_y = weights * grad_out and grad_weights = <grad_out, y>, row by row.
    """
    grad_out, y, row_idx, inverse, topk_weights = ctx.saved_tensors
    # through grad_y: of grad_out, then of the weights
    grad_grad_out = call("fmoe_ext::unpermute", grad_grad_y, row_idx, inverse, topk_weights)
    grad_y = grad_topk_weights = None
    if topk_weights is not None:
        _, grad_topk_weights = call(
            "fmoe_ext::unpermute_backward", grad_out, grad_grad_y, row_idx, inverse, topk_weights
        )
    # through grad_weights: of grad_out, and of y
    if y is not None:
        grad_grad_out = grad_grad_out + call("fmoe_ext::unpermute", y, row_idx, inverse, grad_grad_weights)
        grad_y, _ = call("fmoe_ext::unpermute_backward", grad_out, None, row_idx, inverse, grad_grad_weights)
    return grad_grad_out, grad_y, None, None, grad_topk_weights


register_autograd("fmoe_ext::permute", _permute_backward, _permute_setup, places=(0,))
register_autograd("fmoe_ext::unpermute", _unpermute_backward, _unpermute_setup, places=(0, 3))
register_second_derivative("fmoe_ext::unpermute_backward", _unpermute_backward_backward, keep_inputs)
