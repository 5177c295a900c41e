"""torch's functions with one order of sums, which batch_invariant() puts in their place on its thread (REPLACEMENTS).

A token's bits depend on its batch wherever torch chooses how to compute by the size of a tensor:

* Products are summed in another order for few rows than for many. Here each element is one chain of sums. Linear layers
  are grouped_gemm of one expert. Where k may count positions (attention), the chain runs from the first k to the last,
  so that zeros in front (left padding) and behind (a longer cache, masked keys) change nothing.
* A softmax sums its row in vectors, which begin elsewhere behind padding. Here it is a chain too.
* sum and mean depend on the strides of a tensor. Here they get a contiguous one.
* silu and others use another exponential function for elements after the last whole vector of a thread's part. Here
  each part is made whole.

What torch computes alike at every place (exp, cos, tanh, layer_norm, real products of elements) is left alone. This was
found by trying: tests/ops/test_in_order.py repeats it for the torch that is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from fmoe_ext.ops._autograd import (
    cast_for_autocast,
    is_transformed,
    keep_inputs,
    register_autograd,
    register_fake,
)
from fmoe_ext.ops.batch_invariant import cover_torch_functions, is_batch_invariant
from fmoe_ext.ops.grouped_gemm import grouped_gemm

_MOST_LOGITS = 1 << 25  # of attention at once
_ONE_PART = 32768  # numbers that torch gives to one thread (at::internal::GRAIN_SIZE)


class _InOrder(TorchFunctionMode):
    """Call ours for the functions of torch in REPLACEMENTS, and torch's for all others."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # a graph cannot look into REPLACEMENTS
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            if is_batch_invariant() and func in _PRODUCTS:
                raise RuntimeError(
                    "batch_invariant() promises that a token's result does not depend on its batch, but not with "
                    "torch.compile around a model, whose loops have another order: compile nothing but layers of "
                    'fmoe_ext, or run it uncompiled inside torch.compiler.set_stance("force_eager")'
                )
            return func(*args, **(kwargs or {}))
        ours = REPLACEMENTS.get(func)
        # another thread may have ended the mode of the process, which this thread began
        if ours is None or not is_batch_invariant():
            # most of some hundred calls a token are x.shape and the like: a call without ** is the shorter one
            return func(*args, **kwargs) if kwargs else func(*args)
        return ours(func, *args, **(kwargs or {}))


def _is_covered(*tensors: Any) -> bool:
    """Return whether all are plain tensors of floats on the CPU; a subclass knows itself how it is multiplied."""
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter) or t.device.type != "cpu" or not t.is_floating_point():
            return False
        if t.layout != torch.strided:  # a sparse one has products of its own, which the audit names
            return False
    return True


# Products


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    given = (input, weight) if bias is None else (input, weight, bias)
    if _is_covered(*given) and weight.dim() == 1:
        return _linear(func, input, weight[None], None if bias is None else bias.reshape(1))[..., 0]
    if not _is_covered(*given) or input.dim() == 0 or weight.dim() != 2:
        return func(*given)
    rows = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    offs = torch.full((1,), len(rows), dtype=torch.int32, device="cpu")
    y = grouped_gemm(rows, weight[None], offs, None if bias is None else bias[None])
    return y.view(*input.shape[:-1], len(weight))


def _grouped_mm(
    func: Any, mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, *more: Any, **options: Any
) -> Tensor:
    """Multiply the rows of each group, mat_a [R, D], mat_b [E, D, N] -> [R, N]; torch does so for other shapes."""
    others = [value for value in (*more, *options.values()) if value is not None]
    if not _is_covered(mat_a, mat_b) or offs is None or others or (mat_a.dim(), mat_b.dim()) != (2, 3):
        return func(mat_a, mat_b, offs, *more, **options)
    offs = offs.to(torch.int32)
    if mat_b.mT.is_contiguous():
        return grouped_gemm(mat_a, mat_b.mT, offs)
    return grouped_gemm(mat_a, mat_b, offs, transposed=True)


def _matmul(func: Any, input: Tensor, *others: Tensor, out: Tensor | None = None, **named: Tensor) -> Tensor:
    a, (b,) = (
        input,
        (*others, *named.values()),
    )  # other in matmul, mat2 in bmm and mm, vec in mv, tensor in dot
    if not _is_covered(a, b) or a.dim() == 0 or b.dim() == 0:
        return func(a, b) if out is None else func(a, b, out=out)
    y = _product(*cast_for_autocast(a, b))
    return y if out is None else _write(out, y)


def _write(out: Tensor, y: Tensor) -> Tensor:
    """Write a result into out, which gets its size, as torch does."""
    return (out if out.shape == y.shape else out.resize_(y.shape)).copy_(y)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Compute torch.matmul(a, b): a batch of products, or one whose rows are those of a whole batch."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"both matrices must have one dtype, but got {a.dtype} and {b.dtype}")
    if a.dim() == 1:
        return _product(a[None], b)[..., 0, :] if b.dim() > 1 else _product(a[None], b[:, None])[0, 0]
    if b.dim() == 1:
        return _product(a, b[:, None])[..., 0]
    if a.shape[-1] == b.shape[-2] == 1:  # a sum of one, as of rotary positions
        return a * b
    if b.dim() == 2 and b.stride(0) == 1 and b.stride(1) >= len(b):
        return _linear(F.linear, a, b.mT)  # weight.T, as heads in chunks multiply: the bits of the layer
    if b.dim() == 2:  # its rows are those of one product
        rows = a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1])
        return _batched(rows, b[None]).view(*a.shape[:-1], b.shape[1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    num = math.prod(batch)
    a = a.expand(*batch, *a.shape[-2:]).reshape(num, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(num, *b.shape[-2:])
    return _batched(a, b).view(*batch, a.shape[1], b.shape[2])


def _batched(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [B, M, K] by b [B, K, N] -> [B, M, N] of the dtype of b; a may be wider."""
    y: Tensor = torch.ops.fmoe_ext._matmul_in_order(a.to(torch.promote_types(a.dtype, torch.float32)), b)
    return y.to(b.dtype)


def _add_product(
    func: Any,
    input: Tensor,
    *matrices: Tensor,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    **named: Tensor,
) -> Tensor:
    """Compute torch.addmm or torch.baddbmm, which call the matrices mat1 and mat2, batch1 and batch2."""
    a, b = (*matrices, *(named[name] for name in ("mat1", "batch1", "mat2", "batch2") if name in named))
    if out is not None:
        return _write(out, _add_product(func, input, a, b, beta=beta, alpha=alpha))
    if not _is_covered(input, a, b):
        return func(input, a, b, beta=beta, alpha=alpha)
    input, a, b = cast_for_autocast(input, a, b)
    y = _product(a, b)
    y = y if alpha == 1 else alpha * y
    return y if beta == 0 else y + (input if beta == 1 else beta * input)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention with logits and weights in float32; a row that sees no key gives zeros.

    query [..., Q, C], key and value [..., S, C], a part of the rows at once so that logits [..., Q, S] stay small.
    """
    is_empty = 0 in (query.numel(), key.numel(), value.numel())
    if is_empty or not _is_covered(query, key, value) or query.dim() < 3:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if is_causal and attn_mask is not None:
        raise RuntimeError("attn_mask must be None with is_causal=True")
    query, key, value = cast_for_autocast(query, key, value)
    if not enable_gqa:  # as torch does; with it, the heads have other rules
        masks = () if attn_mask is None else (attn_mask.shape[:-2],)
        sizes = torch.broadcast_shapes(*(t.shape[:-2] for t in (query, key, value)), *masks)
        query = query.expand(*sizes, *query.shape[-2:])
    *batch, num_rows, width = query.shape
    scale = width**-0.5 if scale is None else scale
    at_once = max(1, _MOST_LOGITS // max(1, math.prod(batch) * key.shape[-2]))
    parts = []
    for begin in range(0, num_rows, at_once):
        end = min(begin + at_once, num_rows)
        num_keys = min(end, key.shape[-2]) if is_causal else key.shape[-2]  # no row of the part sees more
        keys, values = key[..., :num_keys, :], value[..., :num_keys, :]
        mask = attn_mask
        if is_causal:
            mask = torch.ones(end - begin, num_keys, dtype=torch.bool, device="cpu").tril(begin)
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., begin:end, :]
        # the heads that share keys are rows of one product
        shared = query[..., begin:end, :].unflatten(-3, (keys.shape[-3], -1)) if enable_gqa else None
        rows = query[..., begin:end, :] if shared is None else shared.flatten(-3, -2)
        logits = _wide_product(rows, keys.mT) * scale
        logits = logits.view(*batch, end - begin, num_keys)
        if mask is not None:
            hidden = ~mask if mask.dtype == torch.bool else None
            logits = logits + mask if hidden is None else logits.masked_fill(hidden, -math.inf)
        weights = _softmax_of_rows(logits, log=False)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        weights = weights if shared is None else weights.view(*rows.shape[:-1], num_keys)
        parts.append(
            _wide_product(weights, values).to(query.dtype).view(*batch, end - begin, value.shape[-1])
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a by b in float32 or wider; the batch dimensions of b are those of a, or broadcast to them."""
    batch = a.shape[:-2]
    a = a.to(torch.promote_types(a.dtype, torch.float32)).reshape(-1, *a.shape[-2:])
    b = b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
    y: Tensor = torch.ops.fmoe_ext._matmul_in_order(a, b)
    return y.view(*batch, *y.shape[-2:])


# Softmax


def _softmax_of_rows(x: Tensor, log: bool) -> Tensor:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y: Tensor = torch.ops.fmoe_ext._softmax_in_order(rows, log)
    return y.view(x.shape)


def _softmax(func: Any, input: Tensor, dim: int | None = None, *more: Any, **options: Any) -> Tensor:
    dtype = options.get("dtype") or next((x for x in more if isinstance(x, torch.dtype)), None)
    if not _is_covered(input) or dim is None or input.dim() == 0:
        return func(input, dim, *more, **options)
    x = input if dtype is None else input.to(dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(dim, -1)
    y = _softmax_of_rows(wide, func in _LOGARITHMS).movedim(-1, dim).to(x.dtype)
    return y if options.get("out") is None else _write(options["out"], y)


_LOGARITHMS = frozenset((F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax))


def _logsumexp(
    func: Any, input: Tensor, dim: Any, keepdim: bool = False, *, out: Tensor | None = None
) -> Tensor:
    if out is not None:
        return _write(out, _logsumexp(func, input, dim, keepdim))
    if not _is_covered(input) or not isinstance(dim, int) or input.numel() == 0:
        return func(input, dim, keepdim)
    largest = input.amax(dim, keepdim=True)
    is_infinite = largest.isinf()  # a row of -inf alone, or one with inf: its largest is the result
    x = input.masked_fill(is_infinite, 0)
    logs = _softmax(F.log_softmax, x, dim, dtype=torch.promote_types(input.dtype, torch.float32))
    y = (x.amax(dim, keepdim=True) - logs.amax(dim, keepdim=True)).to(input.dtype)
    y = torch.where(is_infinite, largest, y)
    return y if keepdim else y.squeeze(dim)


def _cross_entropy(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    usual = (weight, size_average, reduce, label_smoothing) == (None, None, None, 0.0)
    if not _is_covered(input) or not usual or target.is_floating_point():
        return func(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    logs = _softmax(F.log_softmax, input, 1 if input.dim() > 1 else 0)
    return F.nll_loss(logs, target, ignore_index=ignore_index, reduction=reduction)


# Reductions, and functions of elements


def _sum(func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute sum or mean over one dimension."""
    options = {_OF_NUMPY.get(name, name): value for name, value in options.items()}
    names = dict(zip(("dim", "keepdim"), args, strict=False))
    dim = {**names, **options}.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if not _is_covered(input) or not isinstance(dim, int) or input.dim() == 0:
        return func(input, *args, **options)
    last = input.movedim(dim, -1).contiguous()
    out = options.pop("out", None)
    options = {**names, **options, "dim": -1}
    # torch divides one long row among its threads, but never a row of several
    is_divided = last.shape[-1] == last.numel() >= _ONE_PART
    y = func(torch.stack((last, last)), **options)[0] if is_divided else func(last, **options)
    y = y.movedim(-1, dim) if options.get("keepdim") else y
    return y if out is None else _write(out, y)


_OF_NUMPY = MappingProxyType({"axis": "dim", "keepdims": "keepdim"})  # names that torch takes too


def _of_contiguous(func: Any, input: Any, *args: Any, **options: Any) -> Any:
    return func(input.contiguous() if _is_covered(input) else input, *args, **options)


def _of_elements(func: Any, input: Any, *args: Any, **options: Any) -> Any:
    """Call a function of each element on memory that gives each thread whole vectors."""
    if not _is_covered(input) or input.numel() == 0:
        return func(input, *args, **options)
    # the one bool that these functions take
    inplace = options.pop("inplace", False) or True in [value for value in args if isinstance(value, bool)]
    args = tuple(value for value in args if not isinstance(value, bool))
    out = input if inplace else options.pop("out", None)
    num = whole_vectors(input.numel())
    if num == input.numel() and input.is_contiguous():
        old = input.clone() if inplace else input  # which the gradient may need
        y = func(old, *args, **options)
    else:
        flat = F.pad(input.reshape(-1), (0, num - input.numel()))
        y = func(flat, *args, **options)[: input.numel()].view(input.shape)
    return y if out is None else _write(out, y)


def whole_vectors(num: int) -> int:
    """Return the next size whose parts are whole vectors: one part for 32,768 elements, of gelu one for each thread."""
    threads, vectors, few, part = torch.get_num_threads(), 64, 16384, 32768
    while True:
        parts = math.lcm(min(threads, -(-num // part)), threads) if num > few else 1
        rest = num % (parts * vectors)
        if rest == 0:
            return num
        num += parts * vectors - rest


def _in_place(func: Any, input: Any, *args: Any, **options: Any) -> Any:
    """Call a method that writes into its tensor, as x.pow_(2)."""
    if not _is_covered(input):
        return func(input, *args, **options)
    name = func.__name__.removesuffix("_")
    out_of_place = getattr(Tensor, name, None) or getattr(F, name)
    return input.copy_(REPLACEMENTS[out_of_place](out_of_place, input.clone(), *args, **options))


def _rsqrt(func: Any, input: Any, **options: Any) -> Any:
    """Compute rsqrt, which torch rounds alike at every place but for 16 bits, where it is rounded twice at some."""
    is_half = _is_covered(input) and input.itemsize == 2
    return _of_elements(func, input, **options) if is_half else func(input, **options)


EXACT_POWERS = frozenset((0, 0.5, 1, 2, 3))  # products and square roots, rounded alike at every place


def _power(func: Any, input: Any, exponent: Any, **options: Any) -> Any:
    if isinstance(exponent, Tensor):
        return _of_pairs(func, input, exponent, **options)
    if isinstance(input, (int, float)) or exponent in EXACT_POWERS:
        return func(input, exponent, **options)
    return _of_elements(func, input, exponent, **options)


def _power_of_number(func: Any, exponent: Tensor, base: float) -> Any:
    return _of_elements(func, exponent, base)


def _of_pairs(func: Any, input: Any, other: Any, **options: Any) -> Any:
    """Call a function of two tensors, or of one and a number, on memory that gives each thread whole vectors."""
    tensors = [t for t in (input, other) if isinstance(t, Tensor)]
    if options or not _is_covered(*tensors) or len({t.dtype for t in tensors}) > 1:
        return func(input, other, **options)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    num = math.prod(shape)
    rest = whole_vectors(num) - num if num else 0
    a, b = (
        F.pad(t.expand(shape).reshape(-1), (0, rest)) if isinstance(t, Tensor) else t for t in (input, other)
    )
    return func(a, b)[:num].view(shape)


def _add(func: Any, input: Any, other: Any, *, alpha: Any = 1, **options: Any) -> Any:
    """Compute input + alpha * other, or the difference, with a rounding of 16 bits at the end alone.

    torch rounds alpha * other too for the elements after the last whole vector.
    """
    if alpha == 1 or options or not _is_covered(input, other) or input.itemsize > 2 < other.itemsize:
        return func(input, other, alpha=alpha, **options)
    narrow = torch.result_type(input, other)
    wide = torch.promote_types(narrow, torch.float32)
    return func(input.to(wide), other.to(wide) * alpha).to(narrow)


def _add_to(func: Any, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if alpha == 1 or not _is_covered(input, other):
        return func(input, other, alpha=alpha)
    out_of_place = torch.add if func is Tensor.add_ else torch.sub
    return input.copy_(_add(out_of_place, input, other, alpha=alpha))


def _multiply(func: Any, input: Any, other: Any, **options: Any) -> Any:
    """Multiply complex numbers by products of their parts, which torch rounds otherwise in vectors than one by one."""
    tensors = [t for t in (input, other) if isinstance(t, Tensor)]
    if options or not any(t.is_complex() for t in tensors):
        return func(input, other, **options)
    if any(type(t) not in (Tensor, nn.Parameter) or t.device.type != "cpu" for t in tensors):
        return func(input, other)
    (a_real, a_imag), (b_real, b_imag) = (
        (t.real, t.imag) if isinstance(t, complex) or (isinstance(t, Tensor) and t.is_complex()) else (t, 0)
        for t in (input, other)
    )
    real: Any = a_real * b_real - a_imag * b_imag
    imag: Any = a_real * b_imag + a_imag * b_real
    return torch.complex(real, imag)


def _multiply_by(func: Any, input: Tensor, other: Any) -> Any:
    is_complex = isinstance(input, Tensor) and input.is_complex()
    return input.copy_(_multiply(torch.mul, input, other)) if is_complex else func(input, other)


def _square(func: Any, input: Tensor, **options: Any) -> Any:
    is_complex = isinstance(input, Tensor) and input.is_complex() and not options
    return _multiply(torch.mul, input, input) if is_complex else func(input, **options)


def _glu(func: Any, input: Tensor, dim: int = -1) -> Tensor:
    if not _is_covered(input) or input.dim() == 0 or input.shape[dim] % 2 or input.numel() == 0:
        return func(input, dim)
    half = input.chunk(2, dim)[0]
    rest = whole_vectors(half.numel()) - half.numel()
    halves = torch.stack([F.pad(t.reshape(-1), (0, rest)) for t in input.chunk(2, dim)])
    y: Tensor = func(halves, 0)
    return y[0, : half.numel()].view(half.shape)


def _refuse(func: Any, *args: Any, **options: Any) -> Any:
    given = [*args, *options.values()]
    given += [
        t for several in given if isinstance(several, (tuple, list)) for t in several
    ]  # einsum("ij,jk", [a, b])
    if not any(map(_is_covered, given)):
        return func(*args, **options)
    name = getattr(func, "__name__", str(func))
    if name.startswith("conv"):
        why = (
            "its sums over positions have another order with a cache than without; layers of linear attention, state "
            "spaces and convolutions are not covered"
        )
    else:
        why = "the order of its sums follows the shapes: write it with matmul or F.linear"
    raise RuntimeError(
        "batch_invariant() promises that a token's result does not depend on its batch, but not with "
        f"{name}: {why} (docs/routing.md)"
    )


# Gradients


def _backward(
    func: Any, tensors: tuple[Any, ...], inputs: tuple[Any, ...] | None = None, **options: Any
) -> tuple[Tensor | None, ...] | None:
    """Call torch.autograd.backward or torch.autograd.grad so that what checkpoints compute again is in the mode.

    torch takes a mode off while it runs what it replaces, here the whole backward. Of the edges of a graph in place of
    its tensors torch asks no mode, so that it stays on.
    """
    given = (*tensors, *(inputs or ()))
    plain = [t for t in given if not isinstance(t, GradientEdge)]
    if (
        any(type(t) not in (Tensor, nn.Parameter) or not t.requires_grad for t in plain)
        or is_transformed(*plain)
        or options.get("materialize_grads")  # needs tensors
    ):
        return func(tensors, inputs=inputs, **options)
    if func is torch.autograd.backward:
        for t in inputs or ():
            if isinstance(t, Tensor):
                t.retain_grad()  # as torch does: an input that is no leaf gets .grad, which an edge does not set
    edges = [t if isinstance(t, GradientEdge) else get_gradient_edge(t) for t in given]
    with _InOrder():
        num = len(tensors)
        return func(tuple(edges[:num]), inputs=tuple(edges[num:]) or None, **options)


def _backward_of_tensor(func: Any, tensor: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
    with _InOrder():
        torch.autograd.backward(tensor, gradient, **options)


_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, torch.bmm, Tensor.bmm, torch.mm,
            Tensor.mm, torch.mv, Tensor.mv, torch.dot, Tensor.dot)  # fmt: skip
# which torch.compile may not trace in the mode
_PRODUCTS = (F.linear, *_MATMULS, F.scaled_dot_product_attention)
REPLACEMENTS: MappingProxyType[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.linear: _linear,
        # F.grouped_mm asks no mode, but calls this one, which does; without the name, F.grouped_mm may ask by then
        getattr(torch, "_grouped_mm", F.grouped_mm): _grouped_mm,
        **dict.fromkeys(_MATMULS, _matmul),
        **dict.fromkeys((torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm), _add_product),
        F.scaled_dot_product_attention: _attention,
        **dict.fromkeys(
            (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax, *_LOGARITHMS), _softmax
        ),
        **dict.fromkeys((torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp), _logsumexp),
        F.cross_entropy: _cross_entropy,
        **dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean), _sum),
        **dict.fromkeys(
            (torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean, torch.std_mean, torch.norm, Tensor.norm,
             torch.linalg.norm, torch.linalg.vector_norm, F.normalize, F.rms_norm, torch.rms_norm),
            _of_contiguous,
        ),
        **dict.fromkeys(
            (F.silu, F.gelu, F.softplus, F.mish, F.elu, F.selu, F.celu, torch.selu, torch.celu,
             F.sigmoid, torch.sigmoid, Tensor.sigmoid, torch.special.expit, torch.exp2, Tensor.exp2,
             torch.special.exp2, torch.sinh, Tensor.sinh, torch.cosh, Tensor.cosh,
             torch.atanh, Tensor.atanh, torch.logit, Tensor.logit, torch.special.logit),
            _of_elements,
        ),
        **dict.fromkeys(
            (torch.atan2, Tensor.atan2, torch.arctan2, Tensor.arctan2,
             torch.logaddexp, Tensor.logaddexp, torch.logaddexp2, Tensor.logaddexp2),
            _of_pairs,
        ),
        F.glu: _glu,
        **dict.fromkeys((torch.add, Tensor.add, torch.sub, Tensor.sub, torch.subtract, Tensor.subtract), _add),
        **dict.fromkeys((Tensor.add_, Tensor.sub_, Tensor.subtract_), _add_to),
        **dict.fromkeys(
            (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply), _multiply
        ),
        **dict.fromkeys((Tensor.mul_, Tensor.__imul__, Tensor.multiply_), _multiply_by),
        **dict.fromkeys((torch.square, Tensor.square), _square),
        **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), _rsqrt),
        **dict.fromkeys((torch.pow, Tensor.pow, Tensor.__pow__), _power),
        Tensor.__rpow__: _power_of_number,
        **dict.fromkeys(
            (Tensor.addmm_, Tensor.baddbmm_, Tensor.sigmoid_, Tensor.exp2_, Tensor.rsqrt_, Tensor.pow_,
             Tensor.atan2_, Tensor.arctan2_, Tensor.atanh_, Tensor.logit_, Tensor.sinh_,
             Tensor.cosh_, F.elu_, F.selu_, F.celu_, torch.selu_, torch.celu_,
             Tensor.__ipow__),  # x **= y, which torch names pow_ but which is another function
            _in_place,
        ),
        **dict.fromkeys(
            (F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, torch.einsum,
             torch.tensordot, torch.inner, Tensor.inner, torch.addmv, Tensor.addmv, Tensor.addmv_, torch.addbmm,
             Tensor.addbmm, Tensor.addbmm_, torch.linalg.multi_dot, torch.chain_matmul, F.bilinear, torch.cdist),
            _refuse,
        ),
        **dict.fromkeys((torch.autograd.backward, torch.autograd.grad), _backward),
        Tensor.backward: _backward_of_tensor,
    }
)  # fmt: skip


# The operators


@register_fake("fmoe_ext::_matmul_in_order", a=3, b=3)
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


@register_fake("fmoe_ext::_softmax_in_order", x=2)
def _(x: Tensor, log: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gradient_of_matmul(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    # aten's, which the mode does not replace: a gradient needs no order
    grad_a = torch.ops.aten.bmm(grad, b.mT.to(a.dtype)) if ctx.needs_input_grad[0] else None
    grad_b = torch.ops.aten.bmm(a.mT, grad).to(b.dtype) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


def _keep_result(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.log = inputs[1]


def _gradient_of_softmax(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (y,) = ctx.saved_tensors
    if ctx.log:
        return grad - y.exp() * grad.sum(-1, keepdim=True), None
    return y * (grad - (y * grad).sum(-1, keepdim=True)), None


register_autograd("fmoe_ext::_matmul_in_order", _gradient_of_matmul, keep_inputs, places=(0, 1))
register_autograd("fmoe_ext::_softmax_in_order", _gradient_of_softmax, _keep_result, places=(0,))

cover_torch_functions(_InOrder)
