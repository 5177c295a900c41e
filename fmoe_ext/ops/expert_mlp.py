from types import MappingProxyType

import torch
import torch.nn.functional as F

from fmoe_ext.ops import debug, gpu_kernels
from fmoe_ext.ops._autograd import (
    cast_for_autocast,
    register_autocast,
    register_fake,
    register_not_differentiable_twice,
    reverse_mode_only,
)
from fmoe_ext.ops.main_grad import NO_GRAPH, MainGrad

ACTIVATIONS = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "swiglu": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        "geglu": lambda h: F.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
        "geglu_tanh": lambda h: F.gelu(h.chunk(2, -1)[0], approximate="tanh") * h.chunk(2, -1)[1],
    }
)


@reverse_mode_only
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
    """Two-layer MLP of each expert over the tokens that chose it, with dispatch and combine fused in.

    x [T, D]; row_idx [T*K], inverse [T, K], offs [E] int32 as sort_tokens returns them; w1 [E, H, D] (gated:
    [E, 2H, D], gate rows before up rows), b1 [E, H or 2H], w2 [E, D, H], b2 [E, D] of the dtype of x;
    topk_weights [T, K] of the dtype of x or float32.
    activation: gelu, gelu_tanh, relu, silu, swiglu, geglu or geglu_tanh.
    Returns the weighted sum over each token's choices [T, D]; with combine=False the (weighted) rows [T*K, D]
    in expert-major order, zero from offs[-1] on. Keeps x, the pre-activation and the indices for backward.
    main_grads: where backward adds the gradients of w1 and w2, instead of returning them; torch.compile then breaks
    the graph here, and refuses with fullgraph=True.
    Raises RuntimeError for an unknown activation, other shapes or dtypes, and on the CPU for bad indices.
    Equivalent to: unpermute(F.linear(act(F.linear(permute(x), w1[e], b1[e])), w2[e], b2[e]), topk_weights).
    """
    gpu_kernels.before(x)
    if debug.wanted(x):
        narrow = (w1[:, :0, :0], None, w2[:, :0, :0], None, None)
        debug.check(
            torch.ops.fmoe_ext.expert_mlp,
            *(x[:, :0], row_idx, inverse, offs),
            *narrow,
            *(activation, combine, False),
        )
    save_h = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, w1, b1, w2, b2, topk_weights)
    )
    if save_h and any(main_grads):
        x, b1, b2 = cast_for_autocast(x, b1, b2)
        return _into_main_grads(
            x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, main_grads
        )
    return torch.ops.fmoe_ext.expert_mlp(
        x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, save_h
    )[0]


def expert_mlp_ref(
    x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights=None, activation="gelu", combine=True
):
    T, K = inverse.shape
    y, begin = [], 0
    for e, end in enumerate(offs.tolist()):
        choices = row_idx[begin:end].long()
        h = F.linear(x[choices // K], w1[e], None if b1 is None else b1[e])
        rows = F.linear(ACTIVATIONS[activation](h), w2[e], None if b2 is None else b2[e])
        if topk_weights is not None:
            rows = (rows * topk_weights.reshape(-1)[choices][:, None]).to(x.dtype)
        y.append(rows)
        begin = end
    y = torch.cat([*y, x.new_zeros(T * K - begin, x.shape[1])])
    if not combine:
        return y
    return (y[inverse.clamp(min=0).long()] * (inverse >= 0)[..., None]).sum(1)


@register_fake("fmoe_ext::expert_mlp")
def _(x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, save_h):
    gpu_kernels.SELECTION.before(x)
    y = x.new_empty((x.shape[0] if combine else row_idx.shape[0], x.shape[1]))
    return y, x.new_empty((row_idx.shape[0], w1.shape[1]) if save_h else (0,))


@register_fake("fmoe_ext::expert_mlp_backward_accumulate")
def _(
    grad_y,
    x,
    row_idx,
    inverse,
    offs,
    w1,
    w2,
    b2,
    topk_weights,
    h,
    activation,
    combine,
    needs,
    main_dw1,
    main_dw2,
):
    returned = list(needs)
    returned[1] &= main_dw1 is None
    returned[3] &= main_dw2 is None
    return _new_gradients(x, inverse, w1, w2, topk_weights, returned)


@register_fake("fmoe_ext::expert_mlp_backward")
def _(grad_y, x, row_idx, inverse, offs, w1, w2, b2, topk_weights, h, activation, combine, needs):
    return _new_gradients(x, inverse, w1, w2, topk_weights, needs)


def _new_gradients(x, inverse, w1, w2, topk_weights, needs):
    like = (x, w1, w1, w2, w2, x if topk_weights is None else topk_weights)
    shapes = (x.shape, w1.shape, w1.shape[:2], w2.shape, w2.shape[:2], inverse.shape)
    return tuple(
        t.new_empty(shape if needed else (0,)) for t, shape, needed in zip(like, shapes, needs, strict=True)
    )


PLACES = (0, 4, 5, 6, 7, 8)  # x, w1, b1, w2, b2, topk_weights among the arguments


def _setup_context(ctx, inputs, output):
    x, row_idx, inverse, offs, w1, _, w2, b2, topk_weights, activation, combine, save_h = inputs
    h = output[1]
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, row_idx, inverse, offs, w1, w2, b2, topk_weights, h)
    ctx.activation, ctx.combine, ctx.save_h = activation, combine, save_h


def _backward(ctx, grad_y, _grad_h):
    none = (None,) * 12
    if grad_y is None:
        return none
    if not ctx.save_h:
        raise RuntimeError(
            "expert_mlp was called with save_h=False, so there is nothing to compute gradients from"
        )
    needs = [ctx.needs_input_grad[i] for i in PLACES]
    computed = torch.ops.fmoe_ext.expert_mlp_backward(
        grad_y, *ctx.saved_tensors, ctx.activation, ctx.combine, needs
    )
    return _placed(none, needs, computed)


def _placed(grads, needs, computed):
    grads = list(grads)
    for place, needed, grad in zip(PLACES, needs, computed, strict=True):
        grads[place] = grad if needed else None
    return tuple(grads)


torch.library.register_autograd("fmoe_ext::expert_mlp", _backward, setup_context=_setup_context)
register_not_differentiable_twice("fmoe_ext::expert_mlp_backward")


class _IntoMainGrads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, main_grads
    ):
        w1, w2 = cast_for_autocast(w1, w2)
        y, h = torch.ops.fmoe_ext.expert_mlp(
            x, row_idx, inverse, offs, w1, b1, w2, b2, topk_weights, activation, combine, True
        )
        ctx.save_for_backward(x, row_idx, inverse, offs, w1, w2, b2, topk_weights, h)
        ctx.activation, ctx.combine, ctx.main_grads = activation, combine, main_grads
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        needs = [ctx.needs_input_grad[i] for i in PLACES]
        wanted = [main if needed else None for main, needed in zip(ctx.main_grads, needs[1:4:2], strict=True)]
        computed = list(
            torch.ops.fmoe_ext.expert_mlp_backward_accumulate(
                *(grad_y, *ctx.saved_tensors, ctx.activation, ctx.combine, needs),
                *(main and main.find() for main in wanted),
            )
        )
        for i, main in zip((1, 3), wanted, strict=True):
            if main:
                computed[i] = main.added()
        return _placed((None,) * 12, needs, computed)


@torch.compiler.disable(reason=NO_GRAPH)
def _into_main_grads(*arguments):
    return _IntoMainGrads.apply(*arguments)


_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.expert_mlp.default, cast=(0, 4, 5, 6, 7))
