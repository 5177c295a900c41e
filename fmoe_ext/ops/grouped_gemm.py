"""grouped_gemm: one product for each expert's rows, with weights as nn.Linear or, transposed, as GPT-OSS stores them.

A forward and its backward are three products. With the weight transposed they are the same three in other roles, so
that the transposed form needs no kernel of its own and no copy of the weight:

                 kernel of y          of dx                of dW
    usual        y  = x  W^T          dx = dy W            dW = dy^T x
    transposed   dx = dy V^T          y  = x  V            dV = x^T  dy

Gradients come in the four ways of expert_mlp.py.
"""

import contextlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.ops import chooser, debug
from fmoe_ext.ops._autograd import (
    call,
    call_functional,
    cast_for_autocast,
    is_transformed,
    refuse_tangents,
    register_autocast,
    register_autograd,
    register_fake,
    register_not_differentiable_twice,
    register_vmap_in_turn,
)
from fmoe_ext.ops._split import Needs, Tensors, differentiate, worthwhile
from fmoe_ext.ops.batch_invariant import batch_invariant_kernels, is_batch_invariant
from fmoe_ext.ops.main_grad import NO_GRAPH, TRANSFORMED_MAIN_GRAD, MainGrad
from fmoe_ext.ops.outside_graphs import outside_graphs


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
    main_grad: MainGrad | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weight: y = x @ weight[e].T + bias[e] on offs[e-1]:offs[e].

    x [R, D], weight [E, N, D], bias [E, N] of one floating dtype, offs [E] int32 -> y [R, N].
    transposed: weight is [E, D, N], as GPT-OSS stores it; outside of torch.func neither it nor its gradient is copied.
    main_grad: where backward adds the gradient of weight, instead of returning it; not with transposed. torch.compile
    then breaks the graph here, and refuses with fullgraph=True.
    Rows at or after offs[-1] are ignored and give zeros; an expert without rows gets zero gradients.
    Raises RuntimeError for other shapes or dtypes, and on the CPU for offs that decrease or exceed R.
    Equivalent to: torch.cat([F.linear(rows, weight[e], bias[e]) for e, rows in enumerate(x.split(counts))]).

    Example:

        >>> x, weight = torch.ones(5, 8), torch.ones(3, 4, 8)
        >>> y = grouped_gemm(x, weight, offs=torch.tensor([2, 2, 5], dtype=torch.int32))  # 2, 0 and 3 rows
        >>> y.shape, y[0, 0]
        (torch.Size([5, 4]), tensor(8.))
    """
    chooser.before(x)
    # torch.func wants all gradients returned
    if torch.is_grad_enabled() and is_transformed(x, weight, bias):
        if main_grad is not None:
            raise RuntimeError(TRANSFORMED_MAIN_GRAD)
        x, weight, bias = cast_for_autocast(x, weight.mT if transposed else weight, bias)
        y: torch.Tensor = call_functional("fmoe_ext::grouped_gemm", x, weight, offs, bias)
        return y
    if transposed:
        if main_grad is not None:
            raise ValueError("transposed=True and main_grad cannot be combined")
        return _grouped_gemm_transposed(x, weight, offs, bias)
    if debug.wanted(x):
        debug.check(torch.ops.fmoe_ext.grouped_gemm, x, weight, offs, cut=(x, weight))
    # as in expert_mlp: three nodes, a node of our own, or the dispatcher's gradient
    if main_grad is not None and torch.is_grad_enabled() and weight.requires_grad:
        return _into_main_grad(_GroupedGemm(main_grad), x, weight, offs, bias)
    if worthwhile((x,), (weight, bias)):
        x, weight, bias = cast_for_autocast(x, weight, bias)
        return differentiate(_GroupedGemm(), (x, offs), (weight, bias))
    return torch.ops.fmoe_ext.grouped_gemm(x, weight, offs, bias)


def grouped_gemm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """Compute grouped_gemm in plain PyTorch: its oracle, without main gradients."""
    weight = weight.mT if transposed else weight
    y, begin = [], 0
    for e, end in enumerate(offs.tolist()):
        y.append(torch.nn.functional.linear(x[begin:end], weight[e], None if bias is None else bias[e]))
        begin = end
    return torch.cat([*y, x.new_zeros(x.shape[0] - begin, weight.shape[1])])


# {argument: its number of dimensions}, for the fake kernels
_RANKS = MappingProxyType({"grad_y": 2, "x": 2, "weight": 3, "offs": 1, "bias": 2, "main_dweight": 3})


@register_fake("fmoe_ext::grouped_gemm", **_RANKS)
def _(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    chooser.while_compiling(x)
    return x.new_empty((x.shape[0], weight.shape[1]))


@register_fake("fmoe_ext::grouped_gemm_backward", **_RANKS)
def _(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    needs: list[bool],
    main_dweight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    returned = (needs[0], needs[1] and main_dweight is None, needs[2])
    shapes = (x.shape, weight.shape, weight.shape[:2])
    return tuple(
        x.new_empty(shape if wanted else (0,)) for shape, wanted in zip(shapes, returned, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, offs, _ = inputs
    # without a gradient of x, backward reads only the weight's shape: keep no weight
    if not ctx.needs_input_grad[0]:
        weight = weight.new_empty(()).expand(weight.shape)
    ctx.save_for_backward(x, weight, offs)


def _backward(ctx: Any, grad_y: torch.Tensor) -> Tensors:
    x, weight, offs = ctx.saved_tensors
    num_given = len(ctx.needs_input_grad)  # 3 when bias is left out of the call
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], num_given > 3 and ctx.needs_input_grad[3]]
    grads = call("fmoe_ext::grouped_gemm_backward", grad_y, x, weight, offs, needs)
    dx, dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, needs, strict=True))
    return (dx, dweight, None, dbias)[:num_given]


register_autograd("fmoe_ext::grouped_gemm", _backward, _setup_context, places=(0, 1, 3))
register_not_differentiable_twice("fmoe_ext::grouped_gemm_backward")
register_vmap_in_turn("fmoe_ext::grouped_gemm_backward")

_library = torch.library.Library("fmoe_ext", "IMPL")  # its registrations live as long as it does
register_autocast(_library, torch.ops.fmoe_ext.grouped_gemm.default, cast=(0, 1, 3))


@dataclass(frozen=True)
class _GroupedGemm:
    """grouped_gemm as a product of _split.py: inputs (x, offs), weights (weight, bias).

    The halves of its backward share nothing, so that backward_inputs leaves nothing for backward_weights.
    """

    main_grad: MainGrad | None = None
    name = "grouped_gemm"

    @property
    def once_differentiable(self) -> bool:
        return self.main_grad is not None

    def shape(self, inputs: Tensors, weights: Tensors) -> tuple[int, ...]:
        x, weight = inputs[0], weights[0]
        assert x is not None and weight is not None
        return (*x.shape[:1], *weight.shape[1:2])

    def forward(self, inputs: Tensors, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        (x, offs), (weight, bias) = inputs, weights
        # with a main gradient the node takes the parameter itself, so that autograd must not see this cast
        if self.main_grad is not None:
            assert weight is not None
            (weight,) = cast_for_autocast(weight)
        return torch.ops.fmoe_ext.grouped_gemm(x, weight, offs, bias), (x, weight, offs)

    def backward(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        dx, *dweights = self._gradients(saved, grad_y, [needs[0][0], *needs[1]])
        return (dx, None), tuple(dweights)

    def backward_inputs(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        return (self._gradients(saved, grad_y, [True, False, False])[0], None), ()

    def backward_weights(
        self, saved: Tensors, grad_y: torch.Tensor, kept: Tensors, needs: list[bool]
    ) -> Tensors:
        return self._gradients(saved, grad_y, [False, *needs])[1:]

    def _gradients(self, saved: Tensors, grad_y: torch.Tensor, needs: list[bool]) -> Tensors:
        """Compute those of dx, dweight and dbias that are needed; with a main gradient, add dweight to that."""
        main_grad = self.main_grad if needs[1] else None
        main = None if main_grad is None else main_grad.find()
        grads = call("fmoe_ext::grouped_gemm_backward", grad_y, *saved, needs, main)
        dx, dweight, dbias = (grad if wanted else None for grad, wanted in zip(grads, needs, strict=True))
        return dx, dweight if main_grad is None else main_grad.added(), dbias


@outside_graphs(NO_GRAPH)
def _into_main_grad(
    product: _GroupedGemm,
    x: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    x, bias = cast_for_autocast(x, bias)  # _GroupedGemm.forward casts the weight
    return differentiate(product, (x, offs), (weight, bias))


class _Transposed:
    """y = x @ weight[e], weight [E, D, N], as a product of _split.py: the second line of the module's table."""

    name = "grouped_gemm"
    once_differentiable = False

    def shape(self, inputs: Tensors, weights: Tensors) -> tuple[int, ...]:
        x, weight = inputs[0], weights[0]
        assert x is not None and weight is not None
        return (x.shape[0], weight.shape[2])

    def forward(self, inputs: Tensors, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        (x, offs), (weight,) = inputs, weights
        assert x is not None and weight is not None
        # the kernel of dx, whose gradient of y is our x; of its own x it reads only the shape
        not_read = x.new_empty((x.shape[0], weight.shape[2]))
        needs = [True, False, False]
        y = torch.ops.fmoe_ext.grouped_gemm_backward(x, not_read, weight, offs, needs)[0]
        return y, (x, weight, offs)

    def backward(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        inputs = self.backward_inputs(saved, grad_y, needs)[0]
        return inputs, self.backward_weights(saved, grad_y, (), needs[1]) if needs[1][0] else (None,)

    def backward_inputs(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        _, weight, offs = saved
        return (torch.ops.fmoe_ext.grouped_gemm(grad_y, weight, offs) if needs[0][0] else None, None), ()

    def backward_weights(
        self, saved: Tensors, grad_y: torch.Tensor, kept: Tensors, needs: list[bool]
    ) -> Tensors:
        wanted = [False, True, False]
        return (call("fmoe_ext::grouped_gemm_backward", saved[0], grad_y, *saved[1:], wanted)[1],)


class _TransposedAtOnce(torch.autograd.Function):
    """_Transposed as one node, for frozen inputs or weights, and for graphs, which take no product as an argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        y, saved = _Transposed().forward((x, offs), (weight,))
        ctx.save_for_backward(*saved)
        ctx.is_batch_invariant = (
            not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
            and is_batch_invariant()
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> Tensors:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        needs = [needs_x, False], [needs_weight]
        with batch_invariant_kernels() if ctx.is_batch_invariant else contextlib.nullcontext():
            (dx, _), (dweight,) = _Transposed().backward(ctx.saved_tensors, grad_y, needs)
        return dx, dweight, None


def _grouped_gemm_transposed(
    x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    x, weight, bias = cast_for_autocast(x, weight, bias)
    if weight.dim() != 3 or weight.shape[1] != x.shape[-1]:
        raise RuntimeError(
            f"weight must have shape [E, D, N] with size {x.shape[-1]} in dimension 1, but got shape "
            f"{list(weight.shape)}"
        )
    refuse_tangents("grouped_gemm", x, weight)
    if debug.wanted(x):  # the operator that checks the indices knows no transposed weight
        usual = weight.mT
        debug.check(torch.ops.fmoe_ext.grouped_gemm, x, usual, offs, cut=(x, usual))
    if worthwhile((x,), (weight,)):
        y = differentiate(_Transposed(), (x, offs), (weight,))
    else:
        y = _TransposedAtOnce.apply(x, weight, offs)
    if bias is None:
        return y
    if bias.dtype != x.dtype or bias.shape != (weight.shape[0], weight.shape[2]):
        raise RuntimeError(
            f"bias must have the dtype of x, {x.dtype}, and shape [E, N] = {[weight.shape[0], weight.shape[2]]}, "
            f"but got {bias.dtype}, {list(bias.shape)}"
        )
    # a product of no columns gives each row its expert's bias alone, zero in the padding, with the exact gradient
    no_columns = x.new_empty((x.shape[0], 0)), weight.new_empty((*bias.shape, 0))
    return y + grouped_gemm(*no_columns, offs, bias)
