"""frozen_gemm: multiply by a packed weight; and packed_product(), the part that frozen_mlp shares on CUDA.

Packed linear layers of a streamed model call it, and experts whose activation frozen_mlp does not have.

The path of a product:

* CPU, few rows of an expert: a kernel decodes 32 columns of a row of the weight into registers and multiplies them by
  up to four rows at once, because reading the weight takes the time, and packed it is short (csrc/gemm/packed_rows.h).
* CPU, more rows: panels of the weight are decoded into the cache, each once for all rows that need it, and multiplied
  as panels of float weights are (csrc/gemm/grouped.h).
* CPU, few rows (16, 32, 64 or any number, by instruction set) and int8_activations: the rows are rounded to 8 bits,
  and the products are of integers (csrc/gemm/integer_rows.h).
* CUDA: one pass decodes the whole weight in memory, and grouped_gemm multiplies. kept.py keeps that copy for a while.

The operator has the product and, with transposed=True, the product with the transposed weight. Each is the gradient of
the other, so one rule serves for derivatives of every order in x. A bias has the first alone: differentiating its
gradient raises.

_decode_packed, for all devices but CUDA, is registered here too: by plain PyTorch.
"""

from typing import Any

import torch

from fmoe_ext.frozen import kept
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
)
from fmoe_ext.ops.grouped_gemm import grouped_gemm, grouped_gemm_ref


def frozen_gemm(
    x: torch.Tensor,
    weight: Quantized,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a packed weight, which is frozen: y = x @ weight[e].T + bias[e] on offs[e-1]:offs[e].

    x [R, in], weight Quantized [E, out, in], offs [E] int32, bias [E, out] of the dtype of x -> y [R, out]. Without
    offs the weight is of one expert, which has all rows. Differentiable in x and bias; keeps the packed weight for
    backward, and not x; on CUDA a decoded copy too, within a bound (keep_decoded). If the weight's
    rows are interleaved, give the bias in that order; y has all gates before all ups. The gradient of bias cannot be
    differentiated: that raises.
    Raises RuntimeError for other shapes or dtypes, and on the CPU for offs that decrease or exceed R.
    Equivalent to: grouped_gemm(x, weight.dequantize(x.dtype), offs, bias).

    Example:

        >>> x, weight = torch.randn(6, 32), fmoe_ext.frozen.quantize(torch.randn(2, 16, 32), "mxfp4")
        >>> y = frozen_gemm(x, weight, offs=torch.tensor([4, 6], dtype=torch.int32))
        >>> torch.allclose(y[:4], x[:4] @ weight.dequantize(torch.float32)[0].T, atol=1e-4)
        True
    """
    chooser.before(x)
    if bias is not None and weight.interleaved:
        bias = gates_first(bias)
    packing = weight.packing()
    if torch.is_grad_enabled() and is_transformed(x, bias):
        x, bias = cast_for_autocast(x, bias)
        return call_functional("fmoe_ext::frozen_gemm", x, weight.rows(), offs, bias, *packing, False)
    op, arguments = torch.ops.fmoe_ext.frozen_gemm, (x, weight.rows(), offs, bias, *packing, False)
    if not (x.requires_grad and torch.is_grad_enabled()) or (
        torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    ):
        return op(*arguments)
    return kept.call_with_ticket(op, x.device, *arguments)


def frozen_gemm_ref(
    x: torch.Tensor,
    weight: Quantized,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute frozen_gemm by grouped_gemm_ref, its oracle, with the decoded weight."""
    if bias is not None and weight.interleaved:
        bias = gates_first(bias)
    return grouped_gemm_ref(x, weight.dequantize(x.dtype), _offs_of(offs, x), bias)


def _offs_of(offs: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return offs, or one end for a single expert that has all rows."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device) if offs is None else offs


@register_fake("fmoe_ext::frozen_gemm", x=2, weight=3, offs=1, bias=2, weight_scale=3, weight_zero=3)
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    weight_zero: torch.Tensor | None,
    weight_format: int,
    weight_interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    packed = Quantized.of_rows(weight, weight_scale, weight_zero, weight_format, weight_interleaved)
    return x.new_empty((x.shape[0], packed.shape[2 if transposed else 1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, weight, offs, _, scale, zero, *ctx.format, ctx.transposed = inputs
    ctx.save_for_backward(weight, offs, scale, zero, kept.ticket())


def _backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight, offs, scale, zero, _ticket = ctx.saved_tensors  # which holds the kept copy until it is taken
    grads: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
    if ctx.needs_input_grad[0]:
        arguments = weight, offs, None, scale, zero, *ctx.format, not ctx.transposed
        grads[0] = call("fmoe_ext::frozen_gemm", grad_y, *arguments)
    if ctx.needs_input_grad[3]:
        # a grouped_gemm without columns is its bias alone: the gradient sums each expert's rows of grad_y
        no_columns = grad_y.new_empty((grad_y.shape[0], 0)), grad_y.new_empty((*weight.shape[:2], 0))
        needs = [False, False, True]
        found = call("fmoe_ext::grouped_gemm_backward", grad_y, *no_columns, _offs_of(offs, grad_y), needs)
        grads[3] = found[2]
    return tuple(grads)


register_autograd("fmoe_ext::frozen_gemm", _backward, _setup_context, places=(0, 3))

_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.frozen_gemm.default, cast=(0, 3))


def packed_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    packing: tuple[Any, ...],
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    """Compute rows @ weight[e].T + bias[e], or rows @ weight[e] if transposed, on CUDA, which has no kernel of it.

    One pass decodes the weight in memory, to the dtype of rows, unless a copy was kept (kept.py). The transposed
    product is a backward's. weight, packing: rows() and packing() of a Quantized.
    """
    decoded = kept.KEPT.decoded(weight, packing, rows.dtype, last=transposed)
    return grouped_gemm(rows, decoded, offs, bias, transposed)


def composed(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    weight_zero: torch.Tensor | None,
    weight_format: int,
    weight_interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    """Compute frozen_gemm on CUDA, by packed_product()."""
    if transposed and bias is not None:
        raise RuntimeError("bias must be None with transposed=True")
    packing = weight_scale, weight_zero, weight_format, weight_interleaved
    return packed_product(x, weight, packing, _offs_of(offs, x), bias, transposed)


_library.impl("frozen_gemm", composed, "CUDA")


def decode_packed(*packing: Any) -> torch.Tensor:
    """Decode a weight: rows() and packing() of a Quantized, and the dtype."""
    return Quantized.of_rows(*packing[:5]).dequantize(packing[5])


_library.impl("_decode_packed", decode_packed, "CompositeExplicitAutograd")
