"""Compute experts whose weights are in files: get them into buffers, then compute as with any others.

experts_forward() of huggingface calls the Streamed that stream() gave a module. It takes one of three ways, by what is
to be computed and what fits (Streamed._forward):

    few    eval(), no gradients, and fewer choices than experts: the chosen experts alone, in slots that stay for later
           tokens
    parts  two layers do not fit: parts of a layer, each computed while the next one is read
    whole  a layer in a buffer, while the next layers are read into the others

Autograd would keep the weights for the backward, and with them the buffer. So for a whole layer hooks for saved tensors
make it keep their places in the buffer, and the backward leases the buffer anew (_pack, _unpack); parts are borrowed
for the forward, and once more for the backward (frozen/frozen_mlp.py).

For parts, choices are sorted by expert once, so that a part's rows lie together:

    rows of part 0 | of part 1 | ... | rows of dropped choices, which are zeros

A token's rows are summed when all parts are done, so outputs and gradients have the bits of the whole layer. A backward
reads the parts again, in reverse, by frozen_mlp_borrowing where that computes what the layer does, else by _Computed,
which repeats compute() under autograd.

T tokens of width D, K experts a token, R = T * K rows sorted by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.adapters import Lora, take
from fmoe_ext.finetune.streaming.budget import ExpertStream
from fmoe_ext.finetune.streaming.pool import Lease, Part, Phase
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.frozen_mlp import Borrowed, frozen_mlp_borrowing
from fmoe_ext.huggingface.experts import activation_of, compute
from fmoe_ext.huggingface.lattice import is_rounded
from fmoe_ext.recompute import can_be_repeated, is_repeated
from fmoe_ext.routing import widen


class Streamed:
    """The experts of one layer of a stream. index: of the layer among those with experts.

    int8_activations: as in Quantized, for the weights whose formats have it.
    """

    def __init__(
        self, stream: ExpertStream, index: int, dtype: torch.dtype, int8_activations: bool = False
    ) -> None:
        self.stream, self.index, self.dtype = stream, index, dtype
        self.int8_activations = int8_activations

    def __deepcopy__(self, memo: dict[int, Any]) -> Streamed:
        return self  # copies of the model share files and buffers

    def forward(
        self, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """Compute what huggingface's experts_forward does, of the same arguments; raises what Pool.whole() raises."""
        num_experts = self.stream.pool.layers[self.index].num_experts
        is_few = not torch.is_grad_enabled() and top_k_index.numel() < num_experts
        # The first layer begins a step. For a token of generation all is counted already, and counting takes longer.
        if self.index == 0 and not (is_few and self.stream.is_counted):
            self.stream.before_step(experts.training)
        with self.stream.pool.used():
            steps = self.stream.steps
            if steps is None:
                return self._forward(experts, hidden_states, top_k_index, top_k_weights)
            is_backward = is_repeated()  # a checkpoint repeats the forward, just before the layer's backward
            if self.index == 0 and not is_backward:
                steps.begin()
            try:
                return self._forward(experts, hidden_states, top_k_index, top_k_weights)
            finally:  # torch ends a recomputation by an exception when it has all that the backward needs
                num_tokens = top_k_index.shape[0]
                steps.after(self.index, num_tokens, is_backward=is_backward, is_training=experts.training)

    def _forward(
        self, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        if getattr(experts, "expert_parallel", None) is not None:
            raise RuntimeError("streamed experts are not spread over ranks: call stream() in one process")
        pool = self.stream.pool
        num_experts = pool.layers[self.index].num_experts
        taken = take(experts)
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        adapters = taken.get(up), taken.get("down_proj")
        biases = (None, None)
        if experts.has_bias:
            biases = getattr(experts, up + "_bias"), experts.down_proj_bias
        x = hidden_states.to(self.dtype)  # [T, D]
        topk_weights = widen(top_k_weights, x.dtype)  # [T, K]
        topk_idx = top_k_index.masked_fill(top_k_index >= num_experts, -1)  # [T, K], -1 for none
        # Few: the weights are of slots, [S, H, D], so choices, adapters and biases are put into the order of the slots.
        with pool.turn:  # until the product is done: another thread's choices would replace the slots
            few = None if experts.training else self._chosen(topk_idx)
            if few is not None:
                weights, slots, order = few
                w1, w2 = self._multiplied(weights)
                adapters = _of_slots(adapters[0], order), _of_slots(adapters[1], order)
                b1, b2 = (None if b is None else b[order] for b in biases)
                out = compute(experts, (w1, b1, w2, b2), x, slots, topk_weights, adapters)
                return out.to(hidden_states.dtype)
        # Parts: the backward will ask for them by number.
        numbers = pool.parts.of_layer[self.index]
        has_graph = torch.is_grad_enabled()
        if len(numbers) > 1:
            is_training = experts.training
            graph = pool.graph() if has_graph else None

            # graph is a default argument, so that it lives as long as this function: while a backward may come
            def weights_of(i: int, phase: Phase, _: Any = graph) -> Any:
                found = pool.part(numbers[i], phase, is_training)
                return found if has_graph else self._multiplied(found)

            parts = [pool.parts[number] for number in numbers]
            is_packed = pool.layers[self.index].is_packed
            given = x, topk_idx, topk_weights, adapters
            rows = _compute_in_parts(experts, weights_of, parts, biases, *given, is_packed)
            return rows.to(hidden_states.dtype)
        # Whole.
        found = pool.whole(self.index, is_backward=is_repeated(), is_training=experts.training)
        w1, w2 = self._multiplied(found)
        hooks: AbstractContextManager[Any] = nullcontext()
        if has_graph and not can_be_repeated(False):  # a checkpoint drops what it keeps anyway
            unpack = functools.partial(_unpack, self, pool.graph())
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        with hooks:
            out = compute(experts, (w1, biases[0], w2, biases[1]), x, topk_idx, topk_weights, adapters)
        return out.to(hidden_states.dtype)

    def format_of(self, parameter: str) -> str:
        """Name the format of a parameter's weight in the files, one of frozen.FORMATS or "floats"."""
        layer = self.stream.pool.layers[self.index]
        if not layer.is_packed:
            return "floats"
        # of one expert, of zeros: nothing is read
        weights = layer.weights(np.zeros(layer.num_bytes(1), np.uint8), 1)
        return str(weights[parameter == "down_proj"].format)

    def _multiplied(self, weights: Any) -> Any:
        """Prepare w1 and w2 for their products: rows may be rounded to 8 bits where there is no gradient."""
        if not self.int8_activations or torch.is_grad_enabled():
            return weights
        return tuple(w.in_int8 if isinstance(w, Quantized) else w for w in weights)

    def _chosen(self, topk_idx: Tensor) -> tuple[Any, Tensor, Tensor] | None:
        """Return (weights of the slots, choices as slots, expert in each slot); None unless few experts are chosen."""
        pool = self.stream.pool
        if torch.is_grad_enabled() or pool.holds_all:
            return None
        num_experts = pool.layers[self.index].num_experts
        if topk_idx.numel() >= num_experts:
            return None
        cache = pool.chosen(self.index, topk_idx[topk_idx >= 0].unique().tolist())
        if cache is None:
            return None
        if self.index == 0:
            pool.count(tokens=topk_idx.shape[0])
        return cache.weights, cache.place[topk_idx], cache.order

    def _pack(self, tensor: Tensor) -> Any:
        """Hook for tensors that autograd saves: the place of one in the buffers, any other as it is."""
        if tensor.numel() == 0 or not self.stream.pool.contains(tensor.data_ptr()):
            return tensor
        _, offset = self.stream.pool.layer_at(tensor.data_ptr())
        return _Kept(offset, tensor.dtype, tuple(tensor.shape), tensor.stride())


class _Kept:
    """A tensor in the buffer of a layer: its offset in bytes, dtype, shape and strides."""

    def __init__(self, *values: Any) -> None:
        self.values = values


# The lease is an argument so that autograd keeps it with the hook: until the backward the layer stays one part.
def _unpack(streamed: Streamed, _: Lease, kept: Any) -> Tensor:
    if not isinstance(kept, _Kept):
        return kept
    return streamed.stream.pool.again(streamed.index, *kept.values)


def _of_slots(lora: Lora | None, order: Tensor) -> Lora | None:
    return None if lora is None else lora._replace(a=lora.a[order], b=lora.b[order])


@dataclass(frozen=True)
class _Call:
    """Arguments of _Computed for one part of a call, beside tensors."""

    experts: Any  # the module, of the whole layer
    weights: Borrowed  # of the part's experts
    lora_type: type[Lora]  # of their adapters


def _compute_in_parts(
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
