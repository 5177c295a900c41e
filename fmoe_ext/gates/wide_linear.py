import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import ops


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)  # which raises for "meta"
    return torch.autocast(device_type, enabled=False) if is_on else contextlib.nullcontext()


class _WideLinear(torch.autograd.Function):
    """F.linear of wider copies, which backward makes again: kept are the tensors as they came."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        wide_bias = None if bias is None else bias.to(dtype)
        if inp.is_cuda and dtype == torch.float32 and inp.dtype == weight.dtype != dtype:
            # products of 16-bit numbers are exact in float32, so that only the order of the sum differs
            out = torch.mm(inp, weight.t(), out_dtype=dtype)
            return out if wide_bias is None else out + wide_bias
        return F.linear(inp.to(dtype), weight.to(dtype), wide_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        inp, weight, bias, ctx.dtype = inputs
        ctx.save_for_backward(inp, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inp, weight = ctx.saved_tensors
        needs_inp, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with _without_autocast(grad.device.type):
            grad_inp = (grad @ weight.to(ctx.dtype)).to(inp.dtype) if needs_inp else None
            grad_weight = (grad.t() @ inp.to(ctx.dtype)).to(weight.dtype) if needs_weight else None
            grad_bias = grad.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return grad_inp, grad_weight, grad_bias, None


def wide_linear(inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear computed in float32 or wider, whatever the dtypes and autocast: the scores of a gate.

    inp [T, D], weight [E, D], bias [E] or None -> [T, E] in the widest of their dtypes and float32. Keeps inp and
    weight as they are for backward. Raises RuntimeError for widths that differ, as F.linear does.
    Under fmoe_ext.batch_invariant() computed by our own kernels, with wide copies kept for backward.
    Equivalent to: F.linear(inp.float(), weight.float(), bias.float()).
    """
    if _is_plain(inp, weight, bias):
        return F.linear(inp, weight, bias)
    dtype = torch.promote_types(torch.promote_types(inp.dtype, weight.dtype), torch.float32)
    with _without_autocast(inp.device.type):
        if ops.is_batch_invariant():
            offs = torch.full((1,), inp.shape[0], dtype=torch.int32, device=inp.device)
            row = None if bias is None else bias.to(dtype)[None]
            return ops.grouped_gemm(inp.to(dtype), weight.to(dtype)[None], offs, row)
        if inp.dtype == weight.dtype == dtype:
            return F.linear(inp, weight, None if bias is None else bias.to(dtype))
        return _WideLinear.apply(inp, weight, bias, dtype)


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    """True if all are float32 and nothing asks for another computation than F.linear: the usual case, found fast."""
    for t in tensors:
        if t is not None and t.dtype != torch.float32:
            return False
    if ops.is_batch_invariant():
        return False
    device = tensors[0].device.type if tensors[0] is not None else "meta"
    return device != "meta" and not torch.is_autocast_enabled(device)


def _dequantized(weight: torch.Tensor) -> torch.Tensor:
    """A plain tensor in the place of a quantized subclass (torchao), which does not multiply in other dtypes."""
    is_quantized = type(weight).dequantize is not torch.Tensor.dequantize
    return weight.dequantize() if is_quantized else weight


class WideLinear(nn.Linear):
    """nn.Linear computed by wide_linear: what a gate calls for its scores.

    inp [..., in_features] -> [..., out_features], float32 or wider. Being a module that is called, it takes hooks,
    parametrizations, adapters (LoRA) and offloading as any nn.Linear does; torch.ao's quantize_dynamic, which
    would change the choices, leaves it as it is. A weight of torchao counts by the values that it stands for.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        rows = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        out = wide_linear(rows, _dequantized(self.weight), self.bias)
        return out if inp.dim() == 2 else out.view(*inp.shape[:-1], out.shape[-1])
