"""Compute a layer of experts that is larger than its buffers: a part computes its rows while the next one is read.

Streamed (experts.py) calls compute_in_parts() where a layer has several parts (pool.py). Choices are sorted by expert
once, so a part's rows lie together:

    rows of part 0 | of part 1 | ... | rows of dropped choices, which are zeros

A token's rows are summed when all parts are done, so outputs and gradients have the bits of the whole layer. Nothing
keeps a part's weights: a backward reads the parts again, in reverse, by frozen_mlp_borrowing where that computes what
the layer does, else by _Computed, which repeats compute() under autograd.

T tokens of width D, K experts a token, R = T * K rows sorted by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.adapters import Lora
from fmoe_ext.finetune.streaming.pool import Part, Phase
from fmoe_ext.frozen.frozen_mlp import Borrowed, frozen_mlp_borrowing
from fmoe_ext.huggingface.experts import activation_of, compute
from fmoe_ext.huggingface.lattice import is_rounded
from fmoe_ext.recompute import is_repeated


@dataclass(frozen=True)
class _Call:
    """Arguments of _Computed for one part of a call, beside tensors."""

    experts: Any  # the module, of the whole layer
    weights: Borrowed  # of the part's experts
    lora_type: type[Lora]  # of their adapters


def compute_in_parts(
    experts: Any,
    weights: Callable[[int, Phase], Any],
    parts: Sequence[Part],
    biases: tuple[Tensor | None, Tensor | None],
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    adapters: tuple[Lora | None, Lora | None],
    is_packed: bool,
) -> Tensor:
    """Call huggingface.experts.compute part by part: x [T, D], topk_idx [T, K] -> [T, D].

    weights: gives (w1, w2) of parts[i] in a phase; is_packed: whether they are Quantized. biases, adapters: of w1 and
    w2, of all experts.
    """
    num_experts = parts[-1].end
    # _Computed returns gradients of its tensors alone, which are not the norm's
    norm = getattr(experts, "post_expert_norm", None)
    if norm is not None and torch.is_grad_enabled() and any(p.requires_grad for p in norm.parameters()):
        raise RuntimeError(
            "post_expert_norm of experts that are read in parts is frozen: leave it out of what is trained, or give "
            "stream the memory of two layers"
        )
    if torch.is_autocast_enabled("cpu") and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype("cpu"))
    # Sort the choices: offs [E] are the ends of the experts' rows, row_idx [R] the choice of each row.
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, num_experts)
    ends = offs.tolist()
    # Cut the rows: where those of each part begin, and behind them those of dropped choices.
    bounds = [0, *(ends[part.end - 1] for part in parts)]
    sizes = [end - begin for begin, end in zip(bounds, [*bounds[1:], row_idx.shape[0]], strict=True)]
    x_rows = ops.permute(x, row_idx, inverse).split(sizes)
    # Rows get their weights [R, 1] here if the operator can multiply by them, else when they are summed.
    activation = activation_of(experts, is_packed)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    is_weighted = activation is not None and not has_norm
    of_rows = topk_weights.reshape(-1)[row_idx.clamp(min=0).long()][:, None]
    row_weights = (of_rows if is_weighted else torch.ones_like(of_rows)).split(sizes)
    # Choose as compute() chooses frozen_mlp; under autocast compute() casts, which _Computed repeats.
    is_frozen = activation is not None and (is_packed or any(adapters)) and not is_rounded(adapters)
    is_frozen = is_frozen and not torch.is_autocast_enabled("cpu")
    lora_type = next((type(a) for a in adapters if a), Lora)
    # Compute part by part, each with its experts' slice of adapters and biases.
    lengths = [part.end - part.begin for part in parts]
    trained = [_cut(t, lengths) for a in adapters for t in (a[:2] if a else (None, None))]
    given = [_cut(b, lengths) for b in biases]
    phase = Phase.REPEATED if is_repeated() else Phase.FORWARD
    rows = []
    for i, part in enumerate(parts):
        borrowed = Borrowed(
            functools.partial(weights, i, phase),
            functools.partial(weights, i, Phase.BACKWARD),
            offs[part.begin : part.end] - bounds[i],
            activation or "",
            tuple(a.scale if a else 1.0 for a in adapters),  # type: ignore[arg-type]
        )
        tensors = x_rows[i], row_weights[i], *(t[i] for t in (*trained, *given))
        if is_frozen:
            of_part = frozen_mlp_borrowing(borrowed, *tensors)
            rows.append(experts.post_expert_norm(of_part) if has_norm else of_part)
        else:  # compute() norms them
            rows.append(_Computed.apply(_Call(experts, borrowed, lora_type), *tensors))
    rows.append(torch.zeros_like(x_rows[-1]))
    return ops.unpermute(torch.cat(rows), row_idx, inverse, None if is_weighted else topk_weights)


def _cut(tensor: Tensor | None, lengths: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if tensor is None else tensor.split(lengths)


class _Computed(torch.autograd.Function):
    """Rows of a part as compute() has them; the backward reads the weights and computes the rows again."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return _run(call, call.weights.forward(), *tensors)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = [
            None if t is None else t.detach().requires_grad_(n)
            for t, n in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            rows = _run(ctx.call, ctx.call.weights.backward(), *tensors)
        inputs = [t for t, n in zip(tensors, needed, strict=True) if t is not None and n]
        found = iter(torch.autograd.grad(rows, inputs, grads[0], allow_unused=True))
        return None, *(next(found) if n else None for n in needed)


def _run(call: _Call, weights: Any, *tensors: Any) -> Tensor:
    x, row_weights, a1, lb1, a2, lb2, b1, b2 = tensors
    pairs = ((a1, lb1), (a2, lb2))
    adapters: Any = tuple(
        None if a is None else call.lora_type(a, b, scale)
        for (a, b), scale in zip(pairs, call.weights.scales, strict=True)
    )
    # compute() takes choices: each row chooses one expert of the part, [n, 1]
    offs = call.weights.offs
    expert = torch.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)).long())
    w1, w2 = weights
    return compute(call.experts, (w1, b1, w2, b2), x, expert[:, None], row_weights, adapters)
