"""Experts of a layer that is larger than its buffers: each part computes its rows while the next one is read.

A token's rows are summed when all parts are done, so outputs and gradients have the bits of the whole layer. A backward
reads the parts again, in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.adapters import Lora
from fmoe_ext.finetune.streaming.cut import Part, Phase
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.quantized import gates_first
from fmoe_ext.huggingface.experts import activation_of, compute
from fmoe_ext.huggingface.lattice import is_rounded
from fmoe_ext.ops.activations import activation_number
from fmoe_ext.recompute import is_repeated

Adapters = tuple[Lora | None, Lora | None]


@dataclass(frozen=True)
class _Call:
    """One part of a call: its experts, and the source of their weights.

    activation: of frozen_mlp; weights: (w1, w2) of the part, which keep a buffer while they live.
    """

    experts: Any
    activation: int
    weights: Callable[[Phase], Any]
    offs: Tensor  # [experts of the part]
    lora_type: type[Lora]
    scales: tuple[float, float]


def compute_in_parts(
    experts: Any,
    weights: Callable[[int, Phase], Any],
    parts: Sequence[Part],
    biases: tuple[Tensor | None, Tensor | None],
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    adapters: Adapters,
    is_packed: bool,
) -> Tensor:
    """huggingface.experts.compute, part by part. weights: (w1, w2) of parts[i] in a phase; is_packed: both are."""
    num_experts = parts[-1].end
    norm = getattr(experts, "post_expert_norm", None)
    if norm is not None and torch.is_grad_enabled() and any(p.requires_grad for p in norm.parameters()):
        raise RuntimeError(
            "post_expert_norm of experts that are read in parts is frozen: leave it out of what is trained, or give "
            "stream the memory of two layers"
        )
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype("cpu"))
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, num_experts)
    ends = offs.tolist()
    bounds = [0, *(ends[part.end - 1] for part in parts)]
    sizes = [end - begin for begin, end in zip(bounds, [*bounds[1:], row_idx.shape[0]], strict=True)]
    x_rows = ops.permute(x, row_idx, inverse).split(sizes)
    activation = activation_of(experts, is_packed)
    is_weighted = activation is not None and not getattr(experts, "has_post_expert_norm", False)
    of_rows = topk_weights.reshape(-1)[row_idx.clamp(min=0).long()][:, None]
    row_weights = (of_rows if is_weighted else torch.ones_like(of_rows)).split(sizes)
    is_frozen = activation is not None and (is_packed or any(adapters)) and not is_rounded(adapters)
    function: Any = _Frozen if is_frozen and not torch.is_autocast_enabled("cpu") else _Computed
    lengths = [part.end - part.begin for part in parts]
    trained = [_cut(t, lengths) for a in adapters for t in (a[:2] if a else (None, None))]
    given = [_cut(b, lengths) for b in biases]
    phase = Phase.REPEATED if is_repeated() else Phase.FORWARD
    rows = []
    for i, part in enumerate(parts):
        call = _Call(
            experts,
            activation_number(activation) if activation and function is _Frozen else 0,
            lambda phase, i=i: weights(i, phase),  # type: ignore[misc]
            offs[part.begin : part.end] - bounds[i],
            next((type(a) for a in adapters if a), Lora),
            tuple(a.scale if a else 1.0 for a in adapters),  # type: ignore[arg-type]
        )
        tensors = x_rows[i], row_weights[i], *(t[i] for t in (*trained, *given))
        rows.append(function.apply(call, phase, torch.is_grad_enabled(), *tensors))
    rows.append(torch.zeros_like(x_rows[-1]))
    return ops.unpermute(torch.cat(rows), row_idx, inverse, None if is_weighted else topk_weights)


def _cut(tensor: Tensor | None, lengths: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if tensor is None else tensor.split(lengths)


class _Frozen(torch.autograd.Function):
    """Rows of a part by the operator frozen_mlp, which keeps no weight for the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, phase: Phase, save: bool, *tensors: Any) -> Tensor:
        x, row_weights, *adapters, b1, b2 = tensors
        if any(b is not None and b.requires_grad and save for b in (b1, b2)):
            raise RuntimeError("biases of streamed experts are frozen: leave them out of what is trained")
        routing, weights, packing, low, options = _arguments(call, phase, x, adapters, b1, b2, save)
        out = torch.ops.fmoe_ext.frozen_mlp(
            x, routing, weights, packing, *low, list(call.scales), row_weights, options
        )
        ctx.call = call
        ctx.save_for_backward(*tensors, *out[1:])
        return out[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, row_weights, a1, lb1, a2, lb2, b1, b2, *kept = ctx.saved_tensors
        call = ctx.call
        adapters = a1, lb1, a2, lb2
        given = call, Phase.BACKWARD, x, adapters, b1, b2, True
        routing, weights, packing, low, options = _arguments(*given)
        of_x, of_weights, *of_adapters = ctx.needs_input_grad[3:9]
        needs = [of_x, *of_adapters, of_weights]
        dx, *found, dweights = torch.ops.fmoe_ext.frozen_mlp_backward(
            grads[0], x, routing, weights, packing, *low, list(call.scales), row_weights, kept, options, needs
        )
        found[1], found[3] = (
            g if needed else None for g, needed in zip(found[1::2], needs[2:5:2], strict=True)
        )
        if options[4] and found[1] is not None:
            found[1] = _alternating(found[1])
        results = [dx, dweights, *found]
        wanted = [of_x, of_weights, *of_adapters]
        return None, None, None, *(g if w else None for g, w in zip(results, wanted, strict=True)), None, None


def _arguments(
    call: _Call, phase: Phase, x: Tensor, adapters: Sequence[Any], b1: Any, b2: Any, save: bool
) -> tuple[Any, ...]:
    """Routing, weights, packing, adapters and options of the operator."""
    w1, w2 = call.weights(phase)
    data1, scale1, zero1, format1, interleaved = _of(w1)
    data2, scale2, zero2, format2, _ = _of(w2)
    low = list(adapters)
    if interleaved:
        b1 = None if b1 is None else gates_first(b1)
        low[1] = None if low[1] is None else gates_first(low[1])
    rows = torch.arange(x.shape[0], dtype=torch.int32)
    routing = [rows, rows[:, None], call.offs]
    options = [call.activation, 0, int(save), format1, int(interleaved), format2]
    return routing, [data1, b1, data2, b2], [scale1, zero1, scale2, zero2], low, options


def _of(weight: Any) -> tuple[Any, ...]:
    return (
        (weight.rows(), *weight.packing())
        if isinstance(weight, Quantized)
        else (weight, None, None, 0, False)
    )


def _alternating(rows: Tensor) -> Tensor:
    """The inverse of gates_first."""
    gates, ups = rows.chunk(2, 1)
    return torch.stack((gates, ups), 2).flatten(1, 2)


class _Computed(torch.autograd.Function):
    """Rows of a part as compute() has them; the backward computes them again."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, call: _Call, phase: Phase, save: bool, *tensors: Any) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return _run(call, phase, *tensors)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[3:]
        tensors = [
            None if t is None else t.detach().requires_grad_(n)
            for t, n in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            rows = _run(ctx.call, Phase.BACKWARD, *tensors)
        inputs = [t for t, n in zip(tensors, needed, strict=True) if t is not None and n]
        found = iter(torch.autograd.grad(rows, inputs, grads[0], allow_unused=True))
        return None, None, None, *(next(found) if n else None for n in needed)


def _run(call: _Call, phase: Phase, *tensors: Any) -> Tensor:
    x, row_weights, a1, lb1, a2, lb2, b1, b2 = tensors
    pairs = ((a1, lb1), (a2, lb2))
    adapters: Any = tuple(
        None if a is None else call.lora_type(a, b, scale)
        for (a, b), scale in zip(pairs, call.scales, strict=True)
    )
    expert = torch.repeat_interleave(call.offs.diff(prepend=call.offs.new_zeros(1)).long())
    w1, w2 = call.weights(phase)
    return compute(call.experts, (w1, b1, w2, b2), x, expert[:, None], row_weights, adapters)
