"""Train adapters on the values that packed weights can hold: lora.fuse(quantize=).

Merging an adapter into packed weights W rounds the sum W + scale B A to what the packing can hold, its lattice, and
what was trained in float is lost in part. Here the forward already computes with the rounded sum,

    forward    y = f(x; Q)            Q = round(W + scale B A), packed
    backward   dL/dQ by autograd of f(x; decode(Q)) in float, then dL/d(W + scale B A) := dL/dQ

so that training sees the loss of the merged model. Rounding has no useful gradient: the backward takes it for the
identity (straight-through, Bengio et al., 2013, https://arxiv.org/abs/1308.3432). compute() of experts.py calls
run_rounded() where an adapter is an OnLattice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fmoe_ext.adapters import Lora, OnLattice, change_of
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.rounding import to_nearest

# (x, topk_weights, w1, w2) -> weighted sums of the experts
_Run: TypeAlias = Callable[[Tensor, Tensor, Any, Any], Tensor]


def is_rounded(adapters: tuple[Lora | None, Lora | None]) -> bool:
    """Return True if an adapter is to be rounded together with its weight."""
    return any(isinstance(adapter, OnLattice) for adapter in adapters)


def run_rounded(
    run: _Run,
    x: Tensor,
    topk_weights: Tensor,
    weights: tuple[Quantized, Quantized],
    adapters: tuple[Lora | None, Lora | None],
    transposed: bool,
) -> Tensor:
    """Call run with the packed sums of weights and adapters. transposed: run takes float weights as [E, in, out].

    The backward decodes the weights of this layer, and keeps them and their gradients for its time.
    """
    pairs = [*zip(weights, adapters, strict=True)]
    with torch.no_grad():
        # clones: the backward reads them, and the buffers of a streamed layer have other weights by then
        packed = tuple(w.map(torch.clone) if a is None else _rounded(w, a) for w, a in pairs)
    # Their values are not read: the gradients that the backward returns for the sums reach a and b through them.
    changes = (None if a is None else a.scale * torch.bmm(a.b, a.a) for _, a in pairs)
    result: Tensor = _StraightThrough.apply(run, packed, transposed, x, topk_weights, *changes)
    return result


def _rounded(weight: Quantized, adapter: Lora) -> Quantized:
    """Round weight + adapter to the nearest values of the packing, as `fmoe adapter merge --rounding nearest` does."""
    # rows as in the file; an expert at a time, or all would be float at once
    lies = replace(weight, interleaved=False)
    experts = [
        to_nearest(
            lies.map(lambda t, e=e: t[e : e + 1]),  # type: ignore[misc]
            lies.map(lambda t, e=e: t[e : e + 1]).dequantize()[0]  # type: ignore[misc]
            + change_of(adapter.a[e], adapter.b[e], adapter.scale).float(),
        )
        for e in range(weight.shape[0])
    ]
    scale = None if weight.scale is None else torch.cat([q.scale for q in experts])  # type: ignore[misc]
    zero = None if weight.zero is None else weight.zero.clone()
    return replace(weight, data=torch.cat([q.data for q in experts]), scale=scale, zero=zero)


class _StraightThrough(torch.autograd.Function):
    """run() with packed weights, whose gradients go to the last arguments, the changes."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, packed: Any, transposed: bool, x: Tensor, topk_weights: Tensor, *_: Any
    ) -> Tensor:
        ctx.run, ctx.packed, ctx.transposed = run, packed, transposed
        ctx.save_for_backward(x, topk_weights)
        return run(x, topk_weights, *packed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # run again, in float and under autograd
        x, topk_weights = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        weights = [replace(q, interleaved=False).dequantize(x.dtype).requires_grad_() for q in ctx.packed]
        with torch.enable_grad():
            y = ctx.run(x, topk_weights, *(w.mT if ctx.transposed else w for w in weights))
        # of the inputs that need a gradient: x, topk_weights, and the two sums in place of the two changes
        needed = ctx.needs_input_grad[3:]
        inputs = [t for t, is_needed in zip((x, topk_weights, *weights), needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(y, inputs, grad, allow_unused=True))
        return None, None, None, *(next(found) if is_needed else None for is_needed in needed)
