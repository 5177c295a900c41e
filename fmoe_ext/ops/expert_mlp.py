"""expert_mlp: dispatch, both layers of every expert and combine, as one operator.

    x [T, D] -row_idx-> rows [R, D] -w1-> h [R, F] -activation-> a [R, H] -w2-> rows [R, D] -inverse-> y [T, D]

The rows of expert e are offs[e - 1]:offs[e] of the sorted choices (sort_tokens). The kernels read them from x through
row_idx, so no permuted copy of x is made, and none is kept. For the backward the operator keeps h, the pre-activation
[R, F] (F is H, or 2 H for a gated activation): the activated rows are computed again from it, and so is <grad_y, y>,
the gradient of topk_weights.

A call gets its gradients in one of four ways:
    inputs and weights learn             a node of our own (_split.py)
    either is frozen, or a graph         the dispatcher's registration
    inside torch.func                    call_functional()
    main gradients, outside of graphs    three nodes of _split.py, so that a gradient of the inputs alone adds nothing
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from fmoe_ext.ops import chooser, debug
from fmoe_ext.ops._autograd import (
    below,
    call,
    call_functional,
    cast_for_autocast,
    is_transformed,
    register_autocast,
    register_autograd,
    register_fake,
    register_not_differentiable_twice,
    register_vmap_in_turn,
)
from fmoe_ext.ops._split import Needs, Tensors, differentiate, learns, worthwhile
from fmoe_ext.ops.activations import ACTIVATIONS, activation_number
from fmoe_ext.ops.arguments import ExpertMlp, ExpertMlpBackward, ExpertMlpBackwardWeights
from fmoe_ext.ops.main_grad import NO_GRAPH, TRANSFORMED_MAIN_GRAD, MainGrad
from fmoe_ext.ops.outside_graphs import outside_graphs


def expert_mlp(
    x: torch.Tensor,
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    offs: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    activation: str = "gelu",
    combine: bool = True,
    main_grads: tuple[MainGrad | None, MainGrad | None] = (None, None),
) -> torch.Tensor:
    """Compute each expert's two-layer MLP over the tokens that chose it, with dispatch and combine fused in.

    x [T, D]; row_idx [T*K], inverse [T, K], offs [E] int32 as sort_tokens returns them; w1 [E, H, D] (gated:
    [E, 2H, D], gate rows before up rows), b1 [E, H or 2H], w2 [E, D, H], b2 [E, D] of the dtype of x;
    topk_weights [T, K] of the dtype of x or float32.
    activation: gelu, gelu_tanh, relu, silu, swiglu, geglu, geglu_tanh, relu2 (ReLU^2, So et al. 2021: relu(h) ** 2) or
    clamped_swiglu (GPT-OSS: experts.ClampedSwiGLU).
    Returns the weighted sum over each token's choices [T, D]; with combine=False the (weighted) rows [T*K, D]
    in expert-major order, zero from offs[-1] on. Keeps x, the pre-activation and the indices for backward.
    main_grads: where backward adds the gradients of w1 and w2, instead of returning them; torch.compile then breaks
    the graph here, and refuses with fullgraph=True.
    Raises RuntimeError for an unknown activation, other shapes or dtypes, and on the CPU for bad indices.
    Equivalent to: unpermute(F.linear(act(F.linear(permute(x), w1[e], b1[e])), w2[e], b2[e]), topk_weights).

    Example:

        >>> x, w1, w2 = torch.randn(3, 8), torch.randn(4, 16, 8), torch.randn(4, 8, 16)
        >>> topk_idx, topk_weights = fmoe_ext.ops.topk_gate(torch.randn(3, 4), top_k=2)
        >>> _, offs, row_idx, inverse = fmoe_ext.ops.sort_tokens(topk_idx, num_experts=4)
        >>> expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, "gelu").shape
        torch.Size([3, 8])
    """
    number = activation_number(activation)
    chooser.before(x)
    if debug.wanted(x):
        debug.check(
            torch.ops.fmoe_ext.expert_mlp,
            x, row_idx, inverse, offs, w1, None, w2, None, None,
            number, combine, False,
            cut=(x, w1, w2),
        )  # fmt: skip
    # the operator keeps h only if a backward may come
    inputs, weights = (x, topk_weights, row_idx, inverse, offs), (w1, b1, w2, b2)
    weights_learn = learns(weights)
    save_h = torch.is_grad_enabled() and (weights_learn or learns(inputs))
    if save_h and is_transformed(*inputs[:2], *weights):  # torch.func wants all gradients returned
        if any(main_grads):
            raise RuntimeError(TRANSFORMED_MAIN_GRAD)
        x, *cast = cast_for_autocast(x, *weights)
        arguments = (x, row_idx, inverse, offs, *cast, topk_weights, number, combine, True)
        y: torch.Tensor = call_functional("fmoe_ext::expert_mlp", *arguments)[0]
        return y
    if save_h and weights_learn and any(main_grads):
        return _into_main_grads(_ExpertMlp(number, combine, main_grads), inputs, weights)
    # a node of our own takes half of the dispatcher's host time
    if weights_learn and worthwhile(inputs, weights):
        x, w1, b1, w2, b2 = cast_for_autocast(x, *weights)
        return differentiate(_product(number, combine), (x, *inputs[1:]), (w1, b1, w2, b2))
    # no gradients, those of inputs or of weights alone, or a compiled graph
    return torch.ops.fmoe_ext.expert_mlp(
        x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, number, combine, save_h
    )[0]


def expert_mlp_ref(
    x: torch.Tensor,
    row_idx: torch.Tensor,
    inverse: torch.Tensor,
    offs: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    activation: str = "gelu",
    combine: bool = True,
) -> torch.Tensor:
    """Compute expert_mlp in plain PyTorch: its oracle, without main gradients."""
    T, K = inverse.shape
    rows_of_experts, begin = [], 0  # of each expert, [its rows, D]
    for e, end in enumerate(offs.tolist()):
        choices = row_idx[begin:end].long()  # t * K + k of each row
        h = F.linear(x[choices // K], w1[e], None if b1 is None else b1[e])
        rows = F.linear(ACTIVATIONS[activation](h), w2[e], None if b2 is None else b2[e])
        if topk_weights is not None:
            rows = (rows * topk_weights.reshape(-1)[choices][:, None]).to(x.dtype)
        rows_of_experts.append(rows)
        begin = end
    y = torch.cat([*rows_of_experts, x.new_zeros(T * K - begin, x.shape[1])])
    if not combine:
        return y
    # [T, K, D], zero for dropped choices, summed over K
    return (y[inverse.clamp(min=0).long()] * (inverse >= 0)[..., None]).sum(1)


# {argument: its number of dimensions}, for the fake kernels
_RANKS = MappingProxyType(
    {
        **{"grad_y": 2, "x": 2, "row_idx": 1, "inverse": 2, "offs": 1, "topk_weights": 2, "h": 2},
        **{"w1": 3, "b1": 2, "w2": 3, "b2": 2, "main_dw1": 3, "main_dw2": 3},
    }
)


@register_fake("fmoe_ext::expert_mlp", ExpertMlp, **_RANKS)
def _(a: ExpertMlp) -> tuple[torch.Tensor, torch.Tensor]:
    chooser.while_compiling(a.x)
    y = a.x.new_empty((a.x.shape[0] if a.combine else a.row_idx.shape[0], a.x.shape[1]))
    return y, a.x.new_empty((a.row_idx.shape[0], a.w1.shape[1]) if a.save_h else (0,))


@register_fake("fmoe_ext::expert_mlp_backward", ExpertMlpBackward, **_RANKS)
def _(a: ExpertMlpBackward) -> tuple[torch.Tensor, ...]:
    return _new_gradients(a, _returned(a))


@register_fake("fmoe_ext::expert_mlp_backward_inputs", ExpertMlpBackward, **_RANKS)
def _(a: ExpertMlpBackward) -> tuple[torch.Tensor, ...]:
    dx, *_, dtopk_weights = _new_gradients(a, a.needs)
    R, nothing = a.row_idx.shape[0], a.x.new_empty(0)
    dh = _kept_rows(a.x, R, a.w1.shape[1]) if a.needs[1] or a.needs[2] else nothing
    # a clone: no operator may return one tensor twice
    return dx, dtopk_weights, dh, _kept_rows(a.x, R, a.w2.shape[2]) if a.needs[3] else nothing.clone()


@register_fake("fmoe_ext::expert_mlp_backward_weights", ExpertMlpBackwardWeights, **_RANKS)
def _(a: ExpertMlpBackwardWeights) -> tuple[torch.Tensor, ...]:
    return _new_gradients(a, _returned(a))[1:5]


def _kept_rows(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Make [rows, columns] with the strides of the CPU's kernel: an odd number of cache lines (csrc/kept_rows.h)."""
    if x.device.type != "cpu":
        return x.new_empty((rows, columns))
    line = 64 // x.element_size()
    lines = (columns + line - 1) // line
    return x.new_empty((rows, (lines + 1 - lines % 2) * line))[:, :columns]


def _returned(a: ExpertMlpBackward | ExpertMlpBackwardWeights) -> list[bool]:
    """Leave out of needs what is added to a main gradient."""
    returned = list(a.needs)
    returned[1] &= a.main_dw1 is None
    returned[3] &= a.main_dw2 is None
    return returned


def _new_gradients(
    a: ExpertMlpBackward | ExpertMlpBackwardWeights, needs: Sequence[bool]
) -> tuple[torch.Tensor, ...]:
    """Make dx, dw1, db1, dw2, db2, dtopk_weights, empty those that are not needed."""
    like = (a.x, a.w1, a.w1, a.w2, a.w2, a.x if a.topk_weights is None else a.topk_weights)
    shapes = (a.x.shape, a.w1.shape, a.w1.shape[:2], a.w2.shape, a.w2.shape[:2], a.inverse.shape)
    return tuple(
        t.new_empty(shape if wanted else (0,)) for t, shape, wanted in zip(like, shapes, needs, strict=True)
    )


# of x, w1, b1, w2, b2, topk_weights among the arguments of the operator: what has a gradient
PLACES = (0, 4, 5, 6, 7, 8)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, row_idx, inverse, offs, w1, _, w2, b2, topk_weights, activation, combine, save_h = inputs
    h = output[1]
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)  # no zeros for the gradient of h, which nobody has
    # in the order of expert_mlp_backward's arguments
    ctx.save_for_backward(x, row_idx, inverse, offs, w1, w2, b2, topk_weights, h)
    ctx.activation, ctx.combine, ctx.save_h = activation, combine, save_h


def _backward(ctx: Any, grad_y: torch.Tensor | None, _grad_h: None) -> Tensors:
    grads: list[torch.Tensor | None] = [None] * 12
    if grad_y is None:
        return tuple(grads)
    if not ctx.save_h:
        raise RuntimeError(
            "expert_mlp was called with save_h=False, so there is nothing to compute gradients from"
        )
    needs = [ctx.needs_input_grad[i] for i in PLACES]
    arguments = (grad_y, *ctx.saved_tensors, ctx.activation, ctx.combine, needs)
    computed = call("fmoe_ext::expert_mlp_backward", *arguments)
    for place, wanted, grad in zip(PLACES, needs, computed, strict=True):
        grads[place] = grad if wanted else None
    return tuple(grads)


register_autograd("fmoe_ext::expert_mlp", _backward, _setup_context, places=PLACES)
for _name in ("expert_mlp_backward", "expert_mlp_backward_inputs"):
    register_not_differentiable_twice(f"fmoe_ext::{_name}")
register_vmap_in_turn("fmoe_ext::expert_mlp_backward")


@dataclass(frozen=True)
class _ExpertMlp:
    """expert_mlp as a product of _split.py: inputs (x, topk_weights, row_idx, inverse, offs), weights (w1, b1, w2, b2).

    backward_inputs leaves dh and the scaled activated rows for backward_weights.
    """

    activation: int
    combine: bool
    main_grads: tuple[MainGrad | None, MainGrad | None] = (None, None)
    name = "expert_mlp"

    @functools.cached_property
    def once_differentiable(self) -> bool:
        return any(self.main_grads)

    def shape(self, inputs: Tensors, weights: Tensors) -> tuple[int, ...]:
        x, _, row_idx, _, _ = inputs
        assert x is not None and row_idx is not None
        return (x.shape[0] if self.combine else row_idx.shape[0], *x.shape[1:])

    def forward(self, inputs: Tensors, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        x, topk_weights, *indices = inputs
        w1, b1, w2, b2 = weights
        # with main gradients the node takes the parameters themselves, so that autograd must not see this cast
        if self.once_differentiable:
            w1, w2 = cast_for_autocast(w1, w2)
        arguments = (x, *indices, w1, b1, w2, b2, topk_weights, self.activation, self.combine, True)
        y, h = below(torch.ops.fmoe_ext.expert_mlp, *arguments)
        return y, (x, *indices, w1, w2, b2, topk_weights, h)

    def backward(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        (needs_x, needs_topk_weights, *_), of_weights = needs
        wanted = [needs_x, *of_weights, needs_topk_weights]  # in the order of the operator's results
        mains = self._main_grads_of(of_weights) if self.once_differentiable else (None, None)
        arguments = (grad_y, *saved, self.activation, self.combine, wanted, *mains)
        dx, *dweights, dtopk_weights = call("fmoe_ext::expert_mlp_backward", *arguments)
        inputs = dx if needs_x else None, dtopk_weights if needs_topk_weights else None, None, None, None
        return inputs, self._of_weights(dweights, of_weights)

    def backward_inputs(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        (needs_x, needs_topk_weights, *_), of_weights = needs
        wanted = [needs_x, *of_weights, needs_topk_weights]
        arguments = (grad_y, *saved, self.activation, self.combine, wanted)
        dx, dtopk_weights, *kept = call("fmoe_ext::expert_mlp_backward_inputs", *arguments)
        inputs = dx if needs_x else None, dtopk_weights if needs_topk_weights else None, None, None, None
        return inputs, tuple(kept)

    def backward_weights(
        self, saved: Tensors, grad_y: torch.Tensor, kept: Tensors, needs: list[bool]
    ) -> Tensors:
        *read, _b2, topk_weights, _h = saved
        dweights = torch.ops.fmoe_ext.expert_mlp_backward_weights(
            grad_y, *read, topk_weights, *kept, self.activation, self.combine, [False, *needs, False],
            *self._main_grads_of(needs),
        )  # fmt: skip
        return self._of_weights(list(dweights), needs)

    def _main_grads_of(self, needs: list[bool]) -> Tensors:
        mains = zip(self.main_grads, needs[::2], strict=True)  # those of w1 and w2 among w1, b1, w2, b2
        return tuple(main.find() if main and wanted else None for main, wanted in mains)

    def _of_weights(self, computed: list[torch.Tensor], needs: list[bool]) -> Tensors:
        """Return what autograd gets for w1, b1, w2, b2."""
        grads: list[torch.Tensor | None] = [
            t if wanted else None for t, wanted in zip(computed, needs, strict=True)
        ]
        if self.once_differentiable:
            for i, main in zip((0, 2), self.main_grads, strict=True):
                if main is not None and needs[i]:
                    grads[i] = main.added()
        return tuple(grads)


@functools.cache
def _product(activation: int, combine: bool) -> _ExpertMlp:
    """Return the product without main gradients, made once: there are two for each activation."""
    return _ExpertMlp(activation, combine)


@outside_graphs(NO_GRAPH)
def _into_main_grads(product: _ExpertMlp, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    x, *others = inputs
    w1, b1, w2, b2 = weights
    x, b1, b2 = cast_for_autocast(x, b1, b2)  # _ExpertMlp.forward casts w1 and w2
    return differentiate(product, (x, *others), (w1, b1, w2, b2))


_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.expert_mlp.default, cast=(0, 4, 5, 6, 7))
