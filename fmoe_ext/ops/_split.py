"""Make the autograd nodes of a product: one, or three where a pipeline may ask for the gradients of its inputs first.

Zero-bubble pipeline schedules run autograd for the inputs of a stage, go on, and run it again for the weights. With one
node per product, each of the two runs would compute its whole backward. So where torch.distributed.pipelining is
loaded a product is three nodes, and autograd runs those that it needs:

    y = _Join(_Weights(weights), _Inputs(inputs))

_Join hands the gradient of y to both. Where autograd wants all, _Weights runs first (of two nodes that are ready the
engine takes the younger), computes everything in one go and leaves the inputs' gradients for _Inputs to collect. Where
it wants the inputs only, _Inputs computes those and leaves what _Weights will read. Nothing depends on that order but
the time it takes; what was left is used only for the very gradient of y that it was computed from.

Elsewhere, and in selective checkpoints, the product is one node, _Whole, which takes less time on the host. Code of
your own that splits a backward gets right gradients from it, and saves time if it imports torch.distributed.pipelining
before the forward. A product that adds to a main gradient (main_grad.py) is always three nodes: autograd does not tell
_Whole that it wants the gradients of the inputs alone, which must not add anything.
"""

import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _python_dispatch as python_dispatch

from fmoe_ext.ops._autograd import no_forward_mode
from fmoe_ext.ops.batch_invariant import batch_invariant_kernels, is_batch_invariant

Tensors: TypeAlias = tuple[torch.Tensor | None, ...]
Needs: TypeAlias = tuple[list[bool], list[bool]]  # which inputs, and which weights, need their gradients


class _Product(Protocol):
    """Forward and backward of y = f(inputs, weights)."""

    @property
    def name(self) -> str:
        """Return the name of the operator in errors."""

    @property
    def once_differentiable(self) -> bool:
        """Return whether backward has effects that a second differentiation would not see."""

    def shape(self, inputs: Tensors, weights: Tensors) -> tuple[int, ...]:
        """Return the shape of y."""

    def forward(self, inputs: Tensors, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Return y, and what backward reads."""

    def backward(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        """Return the gradients of the inputs and of the weights."""

    def backward_inputs(self, saved: Tensors, grad_y: torch.Tensor, needs: Needs) -> tuple[Tensors, Tensors]:
        """Return the gradients of the inputs, and what backward_weights reads besides."""

    def backward_weights(
        self, saved: Tensors, grad_y: torch.Tensor, kept: Tensors, needs: list[bool]
    ) -> Tensors:
        """Return the gradients of the weights."""


class _InMode:
    """A product called inside batch_invariant(), whose backward runs in the mode too, after the block or elsewhere."""

    def __init__(self, product: _Product) -> None:
        self.name, self.once_differentiable = product.name, product.once_differentiable
        self.shape, self.forward, self._product = product.shape, product.forward, product

    @batch_invariant_kernels()
    def backward(self, *args: Any) -> tuple[Tensors, Tensors]:
        return self._product.backward(*args)

    @batch_invariant_kernels()
    def backward_inputs(self, *args: Any) -> tuple[Tensors, Tensors]:
        return self._product.backward_inputs(*args)

    @batch_invariant_kernels()
    def backward_weights(self, *args: Any) -> Tensors:
        return self._product.backward_weights(*args)


def differentiate(product: _Product, inputs: Tensors, weights: Tensors) -> torch.Tensor:
    """Compute y = product(inputs, weights) with its gradients."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"torch.jit.trace (and torch.onnx.export with dynamo=False) cannot record the backward of {product.name}: "
            "trace under torch.no_grad(), or use torch.export or torch.compile"
        )
    if is_batch_invariant():
        product = _InMode(product)
    has_main_grad = product.once_differentiable
    may_be_split = "torch.distributed.pipelining" in sys.modules and learns(inputs) and learns(weights)
    # there _Join has to copy y: a split backward does not pay
    selective = (has_main_grad or may_be_split) and is_selective()
    if not has_main_grad and (selective or not may_be_split):
        return _Whole.apply(product, len(inputs), *inputs, *weights)
    # _Inputs before _Weights: of two nodes that are ready, the engine runs the younger first
    link = _Link()
    token = _Inputs.apply(link, product, product.shape(inputs, weights), *inputs)
    # _Weights computes y, but its node must not lead to the inputs: _Inputs does
    detached = tuple(t.detach() if t is not None and t.requires_grad else t for t in inputs)
    needed = [t is not None and t.requires_grad for t in inputs]
    y = _Weights.apply(link, product, detached, needed, *weights)
    return _Join.apply(y, token, selective)


def worthwhile(inputs: Tensors, weights: Tensors) -> bool:
    """Return whether inputs and weights need gradients; never while compiling, which traces the operators' own."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return False
    return learns(inputs) and learns(weights)


def is_selective() -> bool:
    """Return whether torch runs a selective checkpoint, which must see the same operators in both forwards."""
    # torch has no public way to ask; without this one, selective checkpoints raise torch's own errors.
    modes = getattr(python_dispatch, "_get_current_dispatch_mode_stack", list)
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes())


def learns(tensors: Tensors) -> bool:
    """Return whether one of them needs its gradient."""
    for t in tensors:  # noqa: SIM110  # any() of a generator takes several times as long
        if t is not None and t.requires_grad:
            return True
    return False


class _Link:
    """Link from _Inputs to the node of _Weights; a link back would be a circle that is never freed."""

    weights: Any = None  # the ctx of _Weights


def _once_if_asked(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate a backward as once_differentiable, for the products that ask for it."""
    once = once_differentiable(backward)

    def chosen(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        return (once if ctx.product.once_differentiable else backward)(ctx, grad_y)

    return chosen


class _OfProduct(torch.autograd.Function):
    """Base of the nodes: refuses forward mode."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise no_forward_mode(ctx.product.name)


class _Whole(_OfProduct):
    """One node for all gradients."""

    @staticmethod
    def forward(ctx: Any, product: _Product, num_inputs: int, *tensors: torch.Tensor | None) -> torch.Tensor:
        y, saved = product.forward(tensors[:num_inputs], tensors[num_inputs:])
        ctx.save_for_backward(*saved)
        ctx.product, ctx.num_inputs = product, num_inputs
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        _, _, *needs = ctx.needs_input_grad
        split = needs[: ctx.num_inputs], needs[ctx.num_inputs :]
        inputs, weights = ctx.product.backward(ctx.saved_tensors, grad_y, split)
        return None, None, *inputs, *weights


class _Inputs(_OfProduct):
    """The node that gives the gradients of the inputs; its result stands for y in the graph and has no memory."""

    @staticmethod
    def forward(
        ctx: Any, link: _Link, product: _Product, shape: tuple[int, ...], *inputs: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.link, ctx.product = link, product
        like = next(t for t in inputs if t is not None)
        return like.new_empty(()).expand(shape)  # never read

    @staticmethod
    @_once_if_asked
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        weights = ctx.link.weights
        left, weights.left_for_inputs = weights.left_for_inputs, None
        # _Weights has run first and left our gradients. Compared by identity: a graph that is kept (retain_graph) may
        # run again, with another gradient of y.
        if left is not None and left[0] is grad_y:
            return None, None, None, *left[1]
        needs = list(ctx.needs_input_grad[3:]), list(weights.needs_input_grad[4:])
        grads, kept = ctx.product.backward_inputs(weights.saved_tensors, grad_y, needs)
        weights.left_for_weights = grad_y, kept
        return None, None, None, *grads


class _Weights(_OfProduct):
    """The node that computes y, and gives the gradients of the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        link: _Link,
        product: _Product,
        inputs: Tensors,
        inputs_needed: list[bool],
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        y, saved = product.forward(inputs, weights)
        ctx.save_for_backward(*saved)
        ctx.product, ctx.inputs_needed = product, inputs_needed
        ctx.left_for_inputs = ctx.left_for_weights = None  # the gradient of y, and what was computed from it
        link.weights = ctx
        return y

    @staticmethod
    @_once_if_asked
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        needs = list(ctx.needs_input_grad[4:])
        left, ctx.left_for_weights = ctx.left_for_weights, None
        # _Inputs has run first, in an earlier run of autograd, and left what we read besides. With create_graph the
        # whole backward runs again instead: its graph raises when it is differentiated.
        if left is not None and left[0] is grad_y and not torch.is_grad_enabled():
            grads = ctx.product.backward_weights(ctx.saved_tensors, grad_y, left[1], needs)
        else:
            inputs, grads = ctx.product.backward(ctx.saved_tensors, grad_y, (ctx.inputs_needed, needs))
            ctx.left_for_inputs = grad_y, inputs
        return None, None, None, None, *grads


class _Join(torch.autograd.Function):
    """Return y, and hand its gradient to both nodes."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, token: torch.Tensor, selective: bool) -> torch.Tensor:
        if selective:  # such a checkpoint raises if a tensor that it keeps is changed in place (mark_dirty)
            return y.clone()
        ctx.mark_dirty(y)  # no copy, and no view, which a pipeline could not detach
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grad_y, grad_y, None
