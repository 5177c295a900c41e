import torch

from fmoe_ext.ops import debug, gpu_kernels
from fmoe_ext.ops._autograd import (
    cast_for_autocast,
    register_autocast,
    register_fake,
    register_not_differentiable_twice,
    reverse_mode_only,
)
from fmoe_ext.ops.main_grad import NO_GRAPH, MainGrad


@reverse_mode_only
def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    main_grad: MainGrad | None = None,
) -> torch.Tensor:
    """Multiplies the rows of each expert by its weight: y = x @ weight[e].T + bias[e] on offs[e-1]:offs[e].

    x [R, D], weight [E, N, D], bias [E, N] of one floating dtype, offs [E] int32 -> y [R, N].
    transposed: weight is [E, D, N], as GPT-OSS stores it, and is neither copied nor is its gradient.
    main_grad: where backward adds the gradient of weight, instead of returning it; not with transposed. torch.compile
    then breaks the graph here, and refuses with fullgraph=True.
    Rows at or after offs[-1] are ignored and give zeros; an expert without rows gets zero gradients.
    Raises RuntimeError for other shapes or dtypes, and on the CPU for offs that decrease or exceed R.
    Equivalent to: torch.cat([F.linear(rows, weight[e], bias[e]) for e, rows in enumerate(x.split(counts))]).
    """
    gpu_kernels.before(x)
    if transposed:
        if main_grad is not None:
            raise ValueError("transposed=True and main_grad cannot be combined")
        return _grouped_gemm_transposed(x, weight, offs, bias)
    if debug.wanted(x):
        debug.check(torch.ops.fmoe_ext.grouped_gemm, x[:, :0], weight[:, :0, :0], offs)
    if main_grad is not None and torch.is_grad_enabled() and weight.requires_grad:
        x, bias = cast_for_autocast(x, bias)
        return _into_main_grad(x, weight, offs, bias, main_grad)
    return torch.ops.fmoe_ext.grouped_gemm(x, weight, offs, bias)


def grouped_gemm_ref(x, weight, offs, bias=None, transposed=False):
    weight = weight.mT if transposed else weight
    y, begin = [], 0
    for e, end in enumerate(offs.tolist()):
        y.append(torch.nn.functional.linear(x[begin:end], weight[e], None if bias is None else bias[e]))
        begin = end
    return torch.cat([*y, x.new_zeros(x.shape[0] - begin, weight.shape[1])])


@register_fake("fmoe_ext::grouped_gemm")
def _(x, weight, offs, bias=None):
    gpu_kernels.SELECTION.before(x)
    return x.new_empty((x.shape[0], weight.shape[1]))


@register_fake("fmoe_ext::grouped_gemm_backward")
def _(grad_y, x, weight, offs, needs):
    return _new_gradients(x, weight, needs)


@register_fake("fmoe_ext::grouped_gemm_backward_accumulate")
def _(grad_y, x, weight, offs, needs, main_dweight):
    return _new_gradients(x, weight, (needs[0], False, needs[2]))


def _new_gradients(x, weight, needs):
    shapes = (x.shape, weight.shape, weight.shape[:2])
    return tuple(x.new_empty(shape if needed else (0,)) for shape, needed in zip(shapes, needs, strict=True))


def _setup_context(ctx, inputs, output):
    x, weight, offs, _ = inputs
    ctx.save_for_backward(x, weight, offs)


def _backward(ctx, grad_y):
    x, weight, offs = ctx.saved_tensors
    num_given = len(ctx.needs_input_grad)  # 3 when bias is left out
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], num_given > 3 and ctx.needs_input_grad[3]]
    grads = torch.ops.fmoe_ext.grouped_gemm_backward(grad_y, x, weight, offs, needs)
    dx, dweight, dbias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (dx, dweight, None, dbias)[:num_given]


torch.library.register_autograd("fmoe_ext::grouped_gemm", _backward, setup_context=_setup_context)
register_not_differentiable_twice("fmoe_ext::grouped_gemm_backward")

_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.grouped_gemm.default, cast=(0, 1, 3))


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offs, bias, main_grad):
        (weight,) = cast_for_autocast(weight)
        ctx.save_for_backward(x, weight, offs)
        ctx.main_grad = main_grad
        return torch.ops.fmoe_ext.grouped_gemm(x, weight, offs, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        x, weight, offs = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], True, ctx.needs_input_grad[3]]
        dx, _, dbias = torch.ops.fmoe_ext.grouped_gemm_backward_accumulate(
            grad_y, x, weight, offs, needs, ctx.main_grad.find()
        )
        return dx if needs[0] else None, ctx.main_grad.added(), None, dbias if needs[2] else None, None


@torch.compiler.disable(reason=NO_GRAPH)
def _into_main_grad(*arguments):
    return _IntoMainGrad.apply(*arguments)


class _Transposed(torch.autograd.Function):
    """y = x @ weight[e], weight [E, D, N]: of grouped_gemm's three products, each does the work of another."""

    @staticmethod
    def forward(ctx, x, weight, offs):
        ctx.save_for_backward(x, weight, offs)
        not_read = x.new_empty((x.shape[0], weight.shape[2]))
        return torch.ops.fmoe_ext.grouped_gemm_backward(x, not_read, weight, offs, [True, False, False])[0]

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, offs = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.fmoe_ext.grouped_gemm(grad_y, weight, offs)
        if ctx.needs_input_grad[1]:
            needs = [False, True, False]
            dweight = torch.ops.fmoe_ext.grouped_gemm_backward(x, grad_y, weight, offs, needs)[1]
        return dx, dweight, None


def _grouped_gemm_transposed(x, weight, offs, bias):
    x, weight, bias = cast_for_autocast(x, weight, bias)
    if weight.dim() != 3 or weight.shape[1] != x.shape[-1]:
        raise RuntimeError(
            f"weight must have shape [E, D, N] with size {x.shape[-1]} in dimension 1, but got shape "
            f"{list(weight.shape)}"
        )
    y = _Transposed.apply(x, weight, offs)
    if bias is None:
        return y
    if bias.dtype != x.dtype or bias.shape != (weight.shape[0], weight.shape[2]):
        raise RuntimeError(
            f"bias must have the dtype of x, {x.dtype}, and shape [E, N] = {[weight.shape[0], weight.shape[2]]}, "
            f"but got {bias.dtype}, {list(bias.shape)}"
        )
    return y + grouped_gemm(x.new_ones((x.shape[0], 1)), bias.unsqueeze(-1), offs)
