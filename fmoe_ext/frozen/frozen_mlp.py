"""frozen_mlp: the experts' MLP with weights that are not trained, and low-rank adapters beside them.

Adapters are two thin products beside the frozen one, x W^T + scale (x A^T) B^T: adding scale B A to the weights instead
would write all experts' weights anew in each step, and round the sum. For the gradients the forward keeps

    x, h     [T, D], [R, H or 2H]     tokens, and rows before the activation
    u1, u2   [R, rank]                scale * rows @ A^T of each adapter

On the CPU one operator computes a chunk of rows through both layers (csrc/frozen_mlp.cpp); on CUDA composed() and
composed_backward() below do, by grouped_gemm. Experts of Transformers' models call frozen_mlp() where they are packed
or have adapters (huggingface/experts.py), FMoE's where lora.fuse() gave them adapters.

frozen_mlp_borrowing() is for streamed experts (finetune/streaming/experts.py). Where a layer is larger than its
buffers, it is computed in parts, and a later part is read over an earlier one. A weight that autograd saved would have
to stay until the backward, and with it the buffer. So _Rows saves rows, adapters and what the operator keeps, and asks
for the weights again in the backward.

Names: b1 and b2 are biases of w1 and w2, (a1, lb1) and (a2, lb2) the matrices of their adapters.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmoe_ext.adapters import Lora
from fmoe_ext.frozen import kept
from fmoe_ext.frozen.frozen_gemm import packed_product
from fmoe_ext.frozen.quantized import Quantized, gates_first
from fmoe_ext.ops import chooser
from fmoe_ext.ops._autograd import (
    call,
    call_functional,
    cast_for_autocast,
    is_transformed,
    register_autocast,
    register_autograd,
    register_fake,
    register_not_differentiable_twice,
)
from fmoe_ext.ops.activations import FUNCTIONS, activation_number
from fmoe_ext.ops.arguments import FrozenMlp, FrozenMlpBackward
from fmoe_ext.ops.batch_invariant import batch_invariant_kernels, is_batch_invariant
from fmoe_ext.ops.expert_mlp import expert_mlp_ref
from fmoe_ext.ops.grouped_gemm import grouped_gemm
from fmoe_ext.ops.permute import permute, unpermute


def frozen_mlp(
    x: torch.Tensor,
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    offs: torch.Tensor,
    w1: torch.Tensor | Quantized,
    b1: torch.Tensor | None,
    w2: torch.Tensor | Quantized,
    b2: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    activation: str = "gelu",
    combine: bool = True,
    lora1: Lora | None = None,
    lora2: Lora | None = None,
) -> torch.Tensor:
    """Compute expert_mlp with frozen weights and an adapter (LoRA) on one or both of them.

    Arguments that are not named here are expert_mlp's.

    w1, w2: float, or Quantized; b1 and lora1.b have the order of the rows of w1.
    lora1: of w1, a [E, rank, D], b [E, H or 2H, rank]; lora2: of w2, a [E, rank, H], b [E, D, rank]; both of the dtype
    of x. Differentiable in x, topk_weights and the adapters. Keeps x, the pre-activation, the indices and the rank rows
    of each adapter for backward, on CUDA also decoded copies of packed weights within a bound (keep_decoded). No
    gradient of a weight's size is made.
    Raises RuntimeError for weights or biases that require a gradient, an unknown activation, other shapes or dtypes.
    Equivalent to: expert_mlp(..., w1 + lora1.scale * lora1.b @ lora1.a, b1, w2 + lora2.scale * lora2.b @ lora2.a, b2).
    LoRA: Hu et al., 2021, https://arxiv.org/abs/2106.09685

    Example:

        >>> x, w1, w2 = torch.randn(3, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 16)
        >>> topk_idx, topk_weights = fmoe_ext.ops.topk_gate(torch.randn(3, 4), top_k=2)
        >>> _, offs, row_idx, inverse = fmoe_ext.ops.sort_tokens(topk_idx, num_experts=4)
        >>> a, b = torch.randn(4, 2, 8), torch.zeros(4, 16, 2)  # an adapter of rank 2 that adds nothing yet
        >>> lora = fmoe_ext.adapters.Lora(a, b)
        >>> y = frozen_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, lora1=lora)
        >>> plain = fmoe_ext.ops.expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, "gelu")
        >>> torch.allclose(y, plain, rtol=1e-4)
        True
    """
    # 1. Arguments of the operator: bytes and packing of each weight, adapters, biases in the order of the products.
    number = activation_number(activation)
    chooser.before(x)  # on a GPU, kernels are chosen before the product
    (a1, lb1, scale1), (a2, lb2, scale2) = lora1 or (None, None, 1.0), lora2 or (None, None, 1.0)
    data1, packing1, b1, lb1 = _operands(w1, b1, lb1)
    data2, packing2, b2, lb2 = _operands(w2, b2, lb2)
    *packing2, is_interleaved = packing2
    if is_interleaved:
        raise RuntimeError("w2 must not have interleaved rows: only gates and ups of w1 alternate")
    for name, weight in (("w1", data1), ("b1", b1), ("w2", data2), ("b2", b2)):
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires a gradient, which frozen_mlp does not compute: freeze it with "
                f"{name}.requires_grad_(False), or train it with expert_mlp"
            )
    # 2. What is differentiated. Under torch.func requires_grad says nothing, so everything is saved.
    learned = (x, topk_weights, a1, lb1, a2, lb2)
    transformed = torch.is_grad_enabled() and is_transformed(*learned)
    if transformed:
        x, data1, b1, data2, b2, a1, lb1, a2, lb2 = cast_for_autocast(
            x, data1, b1, data2, b2, a1, lb1, a2, lb2
        )
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learned)
    arguments = (
        x, row_idx, inverse, offs, data1, b1, data2, b2, topk_weights, number, combine, save or transformed,
        *packing1, *packing2, a1, lb1, scale1, a2, lb2, scale2,
    )  # fmt: skip
    if transformed:
        y: torch.Tensor = call_functional("fmoe_ext::frozen_mlp", *arguments)[0]
        return y
    if not save or (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
        return torch.ops.fmoe_ext.frozen_mlp(*arguments)[0]
    # the ticket lives as long as the saved tensors, and with it what was decoded for the backward (kept.py)
    return kept.call_with_ticket(torch.ops.fmoe_ext.frozen_mlp, x.device, *arguments)[0]


def _operands(weight: torch.Tensor | Quantized, *of_rows: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the weight or its bytes, its packing (scale, zero, format, interleaved), and of_rows, gates before ups.

    of_rows: what has an entry for each row of the weight in its first dimension after E: bias, b of an adapter.
    """
    if not isinstance(weight, Quantized):
        return weight, (None, None, 0, False), *of_rows
    if weight.interleaved:
        of_rows = tuple(None if t is None else gates_first(t) for t in of_rows)
    return weight.rows(), weight.packing(), *of_rows


def frozen_mlp_ref(
    x: torch.Tensor,
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    offs: torch.Tensor,
    w1: torch.Tensor | Quantized,
    b1: torch.Tensor | None,
    w2: torch.Tensor | Quantized,
    b2: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    activation: str = "gelu",
    combine: bool = True,
    lora1: Lora | None = None,
    lora2: Lora | None = None,
) -> torch.Tensor:
    """Compute frozen_mlp by expert_mlp_ref, its oracle, with the adapters added to the decoded weights."""
    if isinstance(w1, Quantized):
        _, _, b1, lb1 = _operands(w1, b1, None if lora1 is None else lora1.b)
        lora1 = None if lora1 is None else lora1._replace(b=lb1)
        w1 = w1.dequantize(x.dtype)
    if isinstance(w2, Quantized):
        w2 = w2.dequantize(x.dtype)
    if lora1 is not None:
        w1 = w1 + lora1.scale * lora1.b @ lora1.a
    if lora2 is not None:
        w2 = w2 + lora2.scale * lora2.b @ lora2.a
    return expert_mlp_ref(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine)


_NUM_DIMS = MappingProxyType(  # {argument: its number of dimensions}
    {
        **dict.fromkeys(("row_idx", "offs"), 1),
        **dict.fromkeys(("grad_y", "x", "inverse", "b1", "b2", "topk_weights", "h", "u1", "u2"), 2),
        **dict.fromkeys(("w1", "w2", "lora_a1", "lora_b1", "lora_a2", "lora_b2"), 3),
        **dict.fromkeys(("w1_scale", "w1_zero", "w2_scale", "w2_zero"), 3),
    }
)


@register_fake("fmoe_ext::frozen_mlp", FrozenMlp, **_NUM_DIMS)
def _(a: FrozenMlp) -> tuple[torch.Tensor, ...]:
    R, D = a.row_idx.shape[0], a.x.shape[1]
    y = a.x.new_empty((a.x.shape[0] if a.combine else R, D))
    h = a.x.new_empty((R, a.w1.shape[1]) if a.save else (0,))
    return y, h, *(a.x.new_empty((R, 0 if t is None else t.shape[1])) for t in (a.lora_a1, a.lora_a2))


@register_fake("fmoe_ext::frozen_mlp_backward", FrozenMlpBackward, **_NUM_DIMS)
def _(a: FrozenMlpBackward) -> tuple[torch.Tensor, ...]:
    like = (a.x, a.lora_a1, a.lora_b1, a.lora_a2, a.lora_b2, a.topk_weights)
    shapes = (a.x.shape, *(None if t is None else t.shape for t in like[1:5]), a.inverse.shape)
    return tuple(
        (a.x if t is None else t).new_empty(shape if wanted and shape is not None else (0,))
        for t, shape, wanted in zip(like, shapes, a.needs, strict=True)
    )


# Places among the arguments of the operator (ops/arguments.py).
_WEIGHTS = (4, 5, 6, 7)  # w1, b1, w2, b2
_LORA = (19, 20, 22, 23)  # lora_a1, lora_b1, lora_a2, lora_b2
_LEARNED = (0, *_LORA, 8)  # x, ..., topk_weights: in the order of the backward's results


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    a = FrozenMlp(*inputs)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        a.x, a.row_idx, a.inverse, a.offs, a.w1, a.w2, a.b2, a.topk_weights, *output[1:],
        a.w1_scale, a.w1_zero, a.w2_scale, a.w2_zero, a.lora_a1, a.lora_b1, a.lora_a2, a.lora_b2, kept.ticket(),
    )  # fmt: skip
    ctx.activation, ctx.combine, ctx.save = a.activation, a.combine, a.save
    ctx.formats = a.w1_format, a.w1_interleaved, a.w2_format
    ctx.lora_scales = a.lora_scale1, a.lora_scale2


def _backward(ctx: Any, grad_y: torch.Tensor | None, *_: None) -> tuple[torch.Tensor | None, ...]:
    grads: list[torch.Tensor | None] = [None] * len(FrozenMlp._fields)
    if grad_y is None:
        return tuple(grads)
    if any(ctx.needs_input_grad[place] for place in _WEIGHTS):
        raise RuntimeError("frozen_mlp cannot be differentiated in its weights and biases, which are frozen")
    if not ctx.save:
        raise RuntimeError(
            "frozen_mlp was called with save=False, so there is nothing to compute gradients from"
        )
    needs = [ctx.needs_input_grad[place] for place in _LEARNED]
    *read, w1_scale, w1_zero, w2_scale, w2_zero, a1, b1, a2, b2, _ticket = ctx.saved_tensors  # kept.py
    w1_format, w1_interleaved, w2_format = ctx.formats
    computed = call(
        "fmoe_ext::frozen_mlp_backward",
        grad_y, *read, ctx.activation, ctx.combine, needs,
        w1_scale, w1_zero, w1_format, w1_interleaved, w2_scale, w2_zero, w2_format,
        a1, b1, ctx.lora_scales[0], a2, b2, ctx.lora_scales[1],
    )  # fmt: skip
    for place, wanted, grad in zip(_LEARNED, needs, computed, strict=True):
        grads[place] = grad if wanted else None
    return tuple(grads)


register_autograd("fmoe_ext::frozen_mlp", _backward, _setup_context, places=(*_WEIGHTS, *_LEARNED))
register_not_differentiable_twice("fmoe_ext::frozen_mlp_backward")

_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.frozen_mlp.default, cast=(0, *_WEIGHTS, *_LORA))


# What follows computes both operators by grouped_gemm, one product after another, for CUDA, which has no kernel of its
# own. R rows in the experts' order, T tokens, K choices of each, D and H the widths of a token and of an expert.


class _Linear(NamedTuple):
    """w1 or w2 of a call, with its adapter: weight + scale * b @ a. Its products have gates before ups."""

    weight: torch.Tensor  # [E, out, in], or the bytes of a packed one
    packing: tuple[Any, ...]  # Quantized.packing(); format 0 for a float weight
    a: torch.Tensor | None  # [E, rank, in]
    b: torch.Tensor | None  # [E, out, rank]
    scale: float
    offs: torch.Tensor

    def product(
        self, rows: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows @ weight.T + bias [R, out] and scale * rows @ a.T [R, rank]; transposed: [R, in], by b."""
        if self.packing[2] == 0:
            out = grouped_gemm(rows, self.weight, self.offs, bias, transposed)
        else:
            out = packed_product(rows, self.weight, self.packing, self.offs, bias, transposed)
        if self.a is None or self.b is None:
            return out, rows.new_empty((rows.shape[0], 0))
        first, second = (self.b, self.a) if transposed else (self.a, self.b)
        thin = grouped_gemm(rows, first, self.offs, transposed=transposed).mul_(self.scale)
        return out.add_(grouped_gemm(thin, second, self.offs, transposed=transposed)), thin


def _linears(a: FrozenMlp | FrozenMlpBackward) -> tuple[_Linear, _Linear]:
    packing1 = a.w1_scale, a.w1_zero, a.w1_format, a.w1_interleaved
    packing2 = a.w2_scale, a.w2_zero, a.w2_format, False
    return (
        _Linear(a.w1, packing1, a.lora_a1, a.lora_b1, a.lora_scale1, a.offs),
        _Linear(a.w2, packing2, a.lora_a2, a.lora_b2, a.lora_scale2, a.offs),
    )


def _weights_of_rows(topk_weights: torch.Tensor, row_idx: torch.Tensor) -> torch.Tensor:
    """Put topk_weights in the experts' order, [R, 1]; zero for rows of no choice."""
    found = topk_weights.reshape(-1)[row_idx.clamp(min=0).long()]
    return found.masked_fill(row_idx < 0, 0)[:, None]


def _outer(
    left: torch.Tensor, right: torch.Tensor, like: torch.Tensor | None, offs: torch.Tensor
) -> torch.Tensor:
    """Sum left[r].T @ right[r] over each expert's rows -> [E, M, N], the shape of like."""
    wanted = [False, True, False]
    return torch.ops.fmoe_ext.grouped_gemm_backward(left, right, like, offs, wanted)[1]


def composed(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the operator frozen_mlp on CUDA -> y, h, u1, u2; h is empty without save."""
    a = FrozenMlp(*arguments)
    w1, w2 = _linears(a)
    x_RD = permute(a.x, a.row_idx, a.inverse)
    h_RH, u1 = w1.product(x_RD, a.b1)  # of a gated activation [R, 2H]
    rows_RD, u2 = w2.product(FUNCTIONS[a.activation](h_RH), a.b2)
    if a.combine:
        y = unpermute(rows_RD, a.row_idx, a.inverse, a.topk_weights)
    else:
        y = rows_RD
        if a.topk_weights is not None:
            y = (y * _weights_of_rows(a.topk_weights, a.row_idx)).to(y.dtype)
    return y, h_RH if a.save else h_RH.new_empty(0), u1, u2


def composed_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Compute the operator frozen_mlp_backward on CUDA -> gradients of x, a1, b1, a2, b2, topk_weights (or empty).

    Names of gradients begin with d; _RD, _RH: shapes.
    """
    if torch.is_grad_enabled():  # as csrc/checks.h
        raise RuntimeError(
            "a backward of frozen_mlp cannot be differentiated: call it under torch.no_grad(), or differentiate "
            "fmoe_ext.frozen.frozen_mlp"
        )
    a = FrozenMlpBackward(*arguments)
    w1, w2 = _linears(a)
    needs_x, needs_a1, needs_b1, needs_a2, needs_b2, needs_weights = a.needs

    def none() -> torch.Tensor:  # a new one each time: an operator must not return a tensor twice
        return a.x.new_empty(0)

    # 1. Through w2, and the activation again, of which the forward kept the input.
    dout_RD = permute(a.grad_y, a.row_idx, a.inverse) if a.combine else a.grad_y
    dhidden_RH, t2 = w2.product(dout_RD, transposed=True)
    with torch.enable_grad():
        h = a.h.detach().requires_grad_()
        hidden = FUNCTIONS[a.activation](h)
    hidden_RH, u2 = hidden.detach(), a.u2

    # 2. Weights of choices.
    dtopk_weights = none()
    if needs_weights and a.topk_weights is not None:
        # <grad_y, y> of a row without its weight. It equals <dhidden, hidden> + <grad_y, b2>, so y is not kept.
        grad_R = (dhidden_RH * hidden_RH).sum(-1, dtype=torch.promote_types(hidden_RH.dtype, torch.float32))
        if a.b2 is not None:
            # a product of no columns adds the bias alone: b2 of each row's expert
            no_columns = hidden_RH.new_empty((hidden_RH.shape[0], 0)), hidden_RH.new_empty((*a.b2.shape, 0))
            grad_R += (grouped_gemm(*no_columns, a.offs, a.b2) * dout_RD).sum(-1, dtype=grad_R.dtype)
        grad_TK = grad_R[a.inverse.clamp(min=0).long()].masked_fill(a.inverse < 0, 0)
        dtopk_weights = grad_TK.to(a.topk_weights.dtype)

    # 3. y is linear in w2, so a row's weight may scale dhidden and what the adapter's gradients need instead of dout.
    if a.topk_weights is not None:
        weights = _weights_of_rows(a.topk_weights, a.row_idx)
        dhidden_RH, hidden_RH, u2 = ((t * weights).to(t.dtype) for t in (dhidden_RH, hidden_RH, u2))
    (dh_RH,) = torch.autograd.grad(hidden, h, dhidden_RH)
    # 4. Adapters of w2, through w1, adapters of w1.
    da2 = _outer(t2, hidden_RH, a.lora_a2, a.offs) if needs_a2 else none()
    db2 = _outer(dout_RD, u2, a.lora_b2, a.offs) if needs_b2 else none()
    dx_RD, t1 = w1.product(dh_RH, transposed=True)
    da1 = _outer(t1, permute(a.x, a.row_idx, a.inverse), a.lora_a1, a.offs) if needs_a1 else none()
    db1 = _outer(dh_RH, a.u1, a.lora_b1, a.offs) if needs_b1 else none()
    dx = unpermute(dx_RD, a.row_idx, a.inverse, None) if needs_x else none()
    return dx, da1, db1, da2, db2, dtopk_weights


_library.impl("frozen_mlp", composed, "CUDA")
_library.impl("frozen_mlp_backward", composed_backward, "CUDA")


@dataclass(frozen=True)
class Borrowed:
    """The source of the weights of one call, and what it computes with them."""

    forward: Callable[[], Any]  # -> (w1, w2), float or Quantized, which nothing keeps afterwards
    backward: Callable[[], Any]  # the same, for the backward
    offs: torch.Tensor  # [E]: ends of the experts' rows
    activation: str  # of frozen_mlp
    scales: tuple[float, float]  # of the adapters of w1 and w2


def frozen_mlp_borrowing(
    borrowed: Borrowed,
    x_rows: torch.Tensor,
    row_weights: torch.Tensor,
    a1: torch.Tensor | None,
    lb1: torch.Tensor | None,
    a2: torch.Tensor | None,
    lb2: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
) -> torch.Tensor:
    """Compute experts of x_rows [R, D], times row_weights [R, 1]: frozen_mlp(combine=False) of rows in experts' order.

    Raises RuntimeError for biases that require a gradient.
    """
    tensors = x_rows, row_weights, a1, lb1, a2, lb2, b1, b2
    if torch.is_grad_enabled() and any(b is not None and b.requires_grad for b in (b1, b2)):
        raise RuntimeError("biases of streamed experts are frozen: leave them out of what is trained")
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    rows: torch.Tensor = _Rows.apply(borrowed, save, *tensors)
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, borrowed: Borrowed, save: bool, *tensors: Any) -> torch.Tensor:
        x, row_weights, a1, lb1, a2, lb2, b1, b2 = tensors
        w1, w2 = borrowed.forward()
        w1, packing1, b1, lb1 = _operands(w1, b1, lb1)
        w2, packing2 = _operands(w2)
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
        w1, packing1, lb1 = _operands(w1, lb1)
        w2, packing2 = _operands(w2)
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


def _in_order(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make row_idx and inverse for rows that are in the experts' order, with one choice each: the identity."""
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return rows, rows[:, None]
