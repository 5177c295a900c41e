"""Compute grouped_gemm and expert_mlp by torch.nn.functional.grouped_mm and aten, kernels proved elsewhere.

There are two ways in:
    install()           replaces grouped_gemm, expert_mlp and their backwards as a whole: FMOE_GPU_KERNELS=torch, or
                        portable kernels that failed (kernels.py)
    install_products()  gives our CUDA kernels torch's product, for the products at which it won its race (races.py);
                        what is around the product stays ours

The functions take the arguments of the operators (csrc/ops.cpp; ops/arguments.py names them). Letters of shapes:
    T tokens    K choices of a token    R = T * K rows, sorted by expert; those behind offs[-1] are padding
    E experts   D width of a token      H width of the activated rows, F of the rows of w1: 2 H if gated
A row of expert_mlp goes x -> in_rows -> w1 -> activation -> w2 -> weighted sum of each token's K rows.

As a whole it is slower than our kernels: intermediate results go through memory, and weights with a bias or with
widths that are no multiple of 16 bytes are copied.

What torch's grouped_mm does with the ends of the groups: bfloat16 on compute capability 9.0 and 10.x leaves them on the
device, and takes up to 1,023 groups. Everything else, float16 and bfloat16 on 8.0 to 8.9 and 12.0 included, loops over
the groups on the host, which waits for the device and cannot be captured in a graph. cuda/select.h has the same table.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmoe_ext.ops.activations import CLAMPED, CURVES, KINDS
from fmoe_ext.ops.arguments import ExpertMlp, ExpertMlpBackward, ExpertMlpBackwardWeights


def tf32_allowed() -> bool:
    """True if torch allows TF32 in products of float32 on CUDA, at this moment."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Set torch.backends.cuda.matmul.fp32_precision to "tf32" or "ieee" inside the block."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def install(dispatch_key: str) -> torch.library.Library:
    """Make these functions the kernels of "CUDA" or "CPU" tensors, for as long as the result lives."""
    library = torch.library.Library("fmoe_ext", "IMPL")
    for kernel in (
        grouped_gemm,
        grouped_gemm_backward,
        expert_mlp,
        expert_mlp_backward,
        expert_mlp_backward_inputs,
        expert_mlp_backward_weights,
    ):
        with warnings.catch_warnings():
            # torch warns that the kernel of an operator is replaced, which is the purpose
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl(kernel.__name__, kernel, dispatch_key)
    return library


def install_products(dispatch_key: str) -> torch.library.Library:
    """Let the kernels of "CUDA" tensors, or of emulated ones on the "CPU", call torch's product (cuda/products.h)."""

    @torch.no_grad()
    def multiply(a: Tensor, b: Tensor, offs: Tensor, a_transposed: bool, b_transposed: bool) -> Tensor:
        return F.grouped_mm(a.mT if a_transposed else a, b.mT if b_transposed else b, offs=offs)

    library = torch.library.Library("fmoe_ext", "IMPL")
    library.impl("_torch_grouped_mm", multiply, dispatch_key)
    library.impl("_tf32_allowed", tf32_allowed, "CompositeExplicitAutograd")
    return library


def _compute_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which sums and activations of t are computed, as our kernels do."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _padded(t: Tensor, dims: int) -> Tensor:
    """Fill up the last `dims` dimensions with zeros to what grouped_mm takes: multiples of 16 bytes, contiguous."""
    unit = 16 // t.element_size()
    missing = [-size % unit for size in reversed(t.shape[t.dim() - dims :])]
    if any(missing):
        # F.pad takes (before, after) of the last dimension first
        return F.pad(t, [n for size in missing for n in (0, size)])
    t = t.contiguous()
    # a contiguous view into another tensor may still begin off a 16-byte boundary
    return t.clone() if t.data_ptr() % 16 else t


@dataclass(frozen=True)
class _Groups:
    """Rows sorted by expert, and products over each expert's: [offs[e - 1], offs[e]) are those of expert e."""

    given: Tensor  # [E] int32
    num_rows: int

    @cached_property
    def offs(self) -> Tensor:
        """The given ends, forced to rise and to stay inside the rows."""
        if self.given.numel() == 0:
            return self.given
        # the values are on the device, and refusing wrong ones would wait: they must only cause no fault
        return self.given.clamp(0, self.num_rows).cummax(0).values.int()

    @cached_property
    def is_padding(self) -> Tensor:
        """Mask [R, 1] of the rows of no expert."""
        rows = torch.arange(self.num_rows, device=self.given.device)[:, None]
        return rows >= self.offs[-1] if self.given.numel() else rows >= 0

    def owners(self) -> Tensor:
        """Return the expert of each row [R], of padding the last one."""
        rows = torch.arange(self.num_rows, device=self.given.device, dtype=torch.int32)
        return torch.searchsorted(self.offs, rows, right=True).clamp(max=self.given.numel() - 1)

    def ranges(self) -> list[tuple[int, int]]:
        """Return (begin, end) of each expert's rows, read from the device."""
        ends = self.offs.tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def rows_by_weight(self, x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
        """Multiply x [R, K] by weight[e]^T [E, N, K], or transposed: by weight[e] [E, K, N] -> [R, N], padding zero."""
        N = weight.shape[2 if transposed else 1]
        if 0 in (*x.shape, *weight.shape):
            return x.new_zeros(self.num_rows, N)
        if x.dtype == torch.float64:  # grouped_mm does not take it
            y = x.new_zeros(self.num_rows, N)
            for matrix, (begin, end) in zip(weight, self.ranges(), strict=True):
                y[begin:end] = x[begin:end] @ (matrix if transposed else matrix.mT)
            return y
        matrices = _padded(weight, 2)
        y = F.grouped_mm(_padded(x, 1), matrices if transposed else matrices.mT, offs=self.offs)
        # grouped_mm leaves the rows behind the last end as they were in memory
        return y[:, :N].masked_fill(self.is_padding, 0)

    def rows_by_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute a^T b over each expert's rows, a [R, M], b [R, N] -> [E, M, N], zero for an expert without rows."""
        E, M, N = self.given.numel(), a.shape[1], b.shape[1]
        if 0 in (E, M, N, self.num_rows):
            return a.new_zeros(E, M, N)
        if a.dtype == torch.float64:
            return torch.stack([a[begin:end].mT @ b[begin:end] for begin, end in self.ranges()])
        out = F.grouped_mm(_padded(a, 1).mT, _padded(b, 1), offs=self.offs)[:, :M, :N]
        counts = self.offs.diff(prepend=self.offs.new_zeros(1))
        return out.masked_fill((counts == 0)[:, None, None], 0)

    def sums(self, rows: Tensor, factors: Tensor | None = None) -> Tensor:
        """Sum each expert's rows [R, N], times factors [R] if given -> [E, N]: a product by a column of ones.

        Factors are rounded to the rows' dtype, which our kernels do not.
        """
        ones = rows.new_ones(self.num_rows) if factors is None else factors.to(rows.dtype)
        return self.rows_by_rows(ones[:, None], rows)[:, 0].contiguous()

    def dots(self, rows: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Compute the dot product of each row [R, N] and its expert's bias [E, N] -> [R], zero without a bias."""
        if bias is None or 0 in bias.shape:
            return rows.new_zeros(self.num_rows, dtype=dtype)
        return (rows.to(dtype) * bias[self.owners()].to(dtype)).sum(1)

    def weight_gradient(self, a: Tensor, b: Tensor, main_grad: Tensor | None) -> Tensor:
        """Compute rows_by_rows; with a main gradient, add it to that in place and return an empty tensor."""
        if main_grad is None:
            return self.rows_by_rows(a, b).contiguous()
        # In 16 bits the product is rounded before it is added: for float32 operands grouped_mm loops over the experts.
        main_grad += self.rows_by_rows(a, b)
        return a.new_empty(0)


def grouped_gemm(x: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the operator of this name, as do the functions below named like an operator."""
    _check_grouped_gemm(x, weight, offs, bias)
    return _linear(_Groups(offs, x.shape[0]), x, weight, bias)


def _linear(groups: _Groups, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x weight[e]^T + bias[e], zero in padding."""
    # grouped_mm has no bias: as one more column of k it is added before the result is rounded, as our kernels do
    if bias is not None:
        x = torch.cat([x, x.new_ones(x.shape[0], 1)], 1)
        weight = torch.cat([weight, bias[:, :, None]], 2)
    return groups.rows_by_weight(x, weight)


def grouped_gemm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    needs: list[bool],
    main_dweight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    _check_gradient_mode("grouped_gemm_backward", "ops.grouped_gemm")
    _check_grouped_gemm(x, weight, offs, None, grad_y, main_dweight)
    if main_dweight is not None:
        _check_main_grad(main_dweight, weight, "main_dweight", "weight")
    _check_needs(needs, "dx, dweight, dbias")
    groups = _Groups(offs, x.shape[0])
    computed = (
        lambda: groups.rows_by_weight(grad_y, weight, transposed=True),
        lambda: groups.weight_gradient(grad_y, x, main_dweight),
        lambda: groups.sums(grad_y),
    )
    return tuple(
        gradient() if needed else x.new_empty(0) for gradient, needed in zip(computed, needs, strict=True)
    )


@dataclass(frozen=True)
class _Choices:
    """Moves between the tokens and the rows of expert_mlp.

    Row r is choice row_idx[r] of the T * K choices; choice k of token t is row inverse[t, k], -1 if it was dropped.
    Indices are clamped where the result does not matter, since one out of range would fault on the device.
    """

    row_idx: Tensor  # [R]
    inverse: Tensor  # [T, K]

    def in_rows(self, t: Tensor) -> Tensor:
        """Gather the tokens t [T, D] of all rows -> [R, D]; values in padding have no meaning."""
        num_tokens, num_choices = self.inverse.shape
        if 0 in self.inverse.shape:
            return t.new_empty(0, t.shape[1])
        tokens = self.row_idx.div(num_choices, rounding_mode="floor")
        return t.index_select(0, tokens.clamp(0, num_tokens - 1))

    def factors(self, topk_weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the topk_weights [T, K] of all rows -> [R]."""
        if topk_weights.numel() == 0:
            return topk_weights.new_empty(0, dtype=dtype)
        choices = self.row_idx.clamp(0, topk_weights.numel() - 1)
        return topk_weights.flatten().index_select(0, choices).to(dtype)

    def of_choice(self, rows: Tensor, k: int) -> Tensor:
        """Take the row of choice k of each token, zero where it is dropped -> [T, ...]"""
        index = self.inverse[:, k]
        dropped = ((index < 0) | (index >= rows.shape[0])).view(-1, *[1] * (rows.dim() - 1))
        return rows.index_select(0, index.clamp(0, rows.shape[0] - 1)).masked_fill(dropped, 0)

    def summed(self, rows: Tensor, topk_weights: Tensor | None = None) -> Tensor:
        """Sum the rows [R, D] of each token's choices, times topk_weights [T, K] if given -> [T, D]."""
        dtype = _compute_dtype(rows)
        # one choice at a time, in their order, which needs no tensor [T, K, D]
        out = rows.new_zeros(self.inverse.shape[0], rows.shape[1], dtype=dtype)
        for k in range(self.inverse.shape[1] if rows.shape[0] else 0):
            row = self.of_choice(rows, k).to(dtype)
            out += row if topk_weights is None else row * topk_weights[:, k, None].to(dtype)
        return out.to(rows.dtype)

    def gathered(self, values: Tensor) -> Tensor:
        """Gather the values [R] of each choice -> [T, K], zero where it is dropped."""
        if 0 in self.inverse.shape:
            return values.new_zeros(self.inverse.shape)
        return torch.stack([self.of_choice(values, k) for k in range(self.inverse.shape[1])], 1)


@dataclass(frozen=True)
class _Activation:
    """An activation of expert_mlp and its gradient; h [R, F] -> [R, H]."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    gated: bool
    clamped: bool = False  # clamped_swiglu: its factor is up, clamped to [-7, 7], plus 1

    def factor(self, up: Tensor) -> Tensor:
        """Compute the factor by which the activated gate is multiplied."""
        return up.clamp(-7.0, 7.0) + 1 if self.clamped else up

    def __call__(self, h: Tensor) -> Tensor:
        if not self.gated:
            return self.forward(h)
        gate, up = h.chunk(2, -1)
        return self.forward(gate) * self.factor(up)

    def gradient(self, grad: Tensor, h: Tensor) -> Tensor:
        """Compute the gradient of h [R, F] from that of the activated rows [R, H]."""
        if not self.gated:
            return self.backward(grad, h)
        gate, up = (part.contiguous() for part in h.chunk(2, -1))
        # y = f(gate) * factor(up): the product rule, one half for each factor
        grad_up = grad * self.forward(gate)
        if self.clamped:
            grad_up = grad_up * (up.abs() <= 7.0)
        return torch.cat([self.backward(grad * self.factor(up), gate), grad_up], -1)


# by the number under which the operators know an activation: its place in KINDS
ACTIVATIONS = tuple(_Activation(*CURVES[kind.curve], kind.gated, kind.curve == CLAMPED) for kind in KINDS)


def expert_mlp(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = ExpertMlp(*arguments)
    _check_expert_mlp(a)
    groups, choices = _Groups(a.offs, a.row_idx.shape[0]), _Choices(a.row_idx, a.inverse)
    h = _linear(groups, choices.in_rows(a.x), a.w1, a.b1)  # [R, F]
    activated = ACTIVATIONS[a.activation](h.to(_compute_dtype(h))).to(a.x.dtype)  # [R, H]
    y = _linear(groups, activated, a.w2, a.b2)  # [R, D]
    if a.combine:  # [T, D]; else the rows, each times its weight
        y = choices.summed(y, a.topk_weights)
    elif a.topk_weights is not None:
        scaled = y * choices.factors(a.topk_weights, _compute_dtype(y))[:, None]
        y = scaled.to(y.dtype).masked_fill(groups.is_padding, 0)
    return y, h if a.save_h else h.new_empty(0)


def expert_mlp_backward(*arguments: Any) -> tuple[Tensor, ...]:
    a = ExpertMlpBackward(*arguments)
    # the arguments of backward_inputs are those of backward without main_dw1 and main_dw2, its last two
    dx, dtopk_weights, dh, scaled_a = expert_mlp_backward_inputs(*arguments[:13])
    dweights = expert_mlp_backward_weights(
        *a[:7], a.topk_weights, dh, scaled_a, a.activation, a.combine, a.needs, a.main_dw1, a.main_dw2
    )
    return dx, *dweights, dtopk_weights


def expert_mlp_backward_inputs(*arguments: Any) -> tuple[Tensor, ...]:
    a = ExpertMlpBackward(*arguments)
    _check_expert_mlp(a)
    _check_hidden_rows(a.h, a, a.w1.shape[1], "h", "[R, F]")
    groups, choices = _Groups(a.offs, a.row_idx.shape[0]), _Choices(a.row_idx, a.inverse)
    dtype, act = _compute_dtype(a.x), ACTIVATIONS[a.activation]
    grad_rows, wide_h = choices.in_rows(a.grad_y) if a.combine else a.grad_y, a.h.to(dtype)

    # grad: of the activated rows, still without topk_weights, whose own gradient needs it so
    activated, grad = act(wide_h), groups.rows_by_weight(grad_rows, a.w2, transposed=True).to(dtype)  # [R, H]
    scaled, scaled_grad = activated, grad
    if a.topk_weights is not None:
        factors = choices.factors(a.topk_weights, dtype)[:, None]
        scaled, scaled_grad = activated * factors, grad * factors
    dh = act.gradient(scaled_grad, wide_h).to(a.x.dtype)

    nothing = a.x.new_empty(0)
    dtopk_weights = nothing
    if a.needs[5]:
        assert a.topk_weights is not None
        # <grad_row, w2 a + b2> = <w2^T grad_row, a> + <grad_row, b2>: y need not be computed again
        products = (grad * activated).sum(1) + groups.dots(grad_rows, a.b2, dtype)
        dtopk_weights = choices.gathered(products).to(a.topk_weights.dtype)
    return (
        choices.summed(groups.rows_by_weight(dh, a.w1, transposed=True)) if a.needs[0] else nothing.clone(),
        dtopk_weights,
        dh if a.needs[1] or a.needs[2] else nothing.clone(),
        scaled.to(a.x.dtype) if a.needs[3] else nothing.clone(),
    )


def expert_mlp_backward_weights(*arguments: Any) -> tuple[Tensor, ...]:
    a = ExpertMlpBackwardWeights(*arguments)
    _check_expert_mlp(a)
    if a.needs[1] or a.needs[2]:
        _check_hidden_rows(a.dh, a, a.w1.shape[1], "dh", "[R, F]")
    if a.needs[3]:
        _check_hidden_rows(a.scaled_a, a, a.w2.shape[2], "scaled_a", "[R, H]")
    for name, weight, main in (("w1", a.w1, a.main_dw1), ("w2", a.w2, a.main_dw2)):
        if main is not None:
            _check_main_grad(main, weight, f"main_d{name}", name)
    groups, choices = _Groups(a.offs, a.row_idx.shape[0]), _Choices(a.row_idx, a.inverse)
    # dw2 takes the weights of the choices from scaled_a, db2 from factors
    grad_rows = choices.in_rows(a.grad_y) if a.combine else a.grad_y
    factors = None if a.topk_weights is None else choices.factors(a.topk_weights, _compute_dtype(a.x))
    computed = (
        lambda: groups.weight_gradient(a.dh, choices.in_rows(a.x), a.main_dw1),
        lambda: groups.sums(a.dh),
        lambda: groups.weight_gradient(grad_rows, a.scaled_a, a.main_dw2),
        lambda: groups.sums(grad_rows, factors),
    )
    return tuple(
        gradient() if needed else a.x.new_empty(0)
        for gradient, needed in zip(computed, a.needs[1:5], strict=True)
    )


# Checks of the arguments, with the errors of csrc's (checks.h, grouped_gemm.h, expert_mlp.h) but those of sizes past
# 2^31.


def _check_grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    bias: Tensor | None,
    grad_y: Tensor | None = None,
    main_dweight: Tensor | None = None,
) -> None:
    optional = {"bias": bias, "grad_y": grad_y, "main_dweight": main_dweight}
    _check_devices({"x": x, "weight": weight, "offs": offs}, optional)
    _check_float(x, "x")
    _check_shape(x, "x", "[R, D]", None, None)
    _check_like(weight, x, "weight", "x")
    _check_shape(weight, "weight", "[E, N, D]", None, None, x.shape[1])
    _check_int32(offs, "offs")
    E, N, _ = weight.shape
    _check_shape(offs, "offs", "[E]", E)
    if bias is not None:
        _check_like(bias, x, "bias", "x")
        _check_shape(bias, "bias", "[E, N]", E, N)
    if grad_y is not None:
        _check_like(grad_y, x, "grad_y", "x")
        _check_shape(grad_y, "grad_y", "[R, N]", x.shape[0], N)


def _check_expert_mlp(a: ExpertMlp | ExpertMlpBackward | ExpertMlpBackwardWeights) -> None:
    """Check the arguments that expert_mlp and the halves of its backward share; then those of a backward."""
    needed = ("x", "row_idx", "inverse", "offs", "w1", "w2", "grad_y", "h", "dh", "scaled_a")
    optional = ("b1", "b2", "topk_weights", "main_dw1", "main_dw2")
    given = a._asdict()
    _check_devices(*({name: given[name] for name in names if name in given} for names in (needed, optional)))
    if not 0 <= a.activation < len(KINDS):
        raise RuntimeError(
            f"activation must be in [0, {len(KINDS)}), a place in ops.ACTIVATIONS, but got {a.activation}"
        )
    # the sizes T, K, E, D and H follow from x, inverse and w2, with which the others are compared
    gated = KINDS[a.activation].gated
    x, w1, w2 = a.x, a.w1, a.w2
    _check_float(x, "x")
    _check_shape(x, "x", "[T, D]", None, None)
    _check_int32(a.inverse, "inverse")
    _check_shape(a.inverse, "inverse", "[T, K]", x.shape[0], None)
    T, K = a.inverse.shape
    _check_int32(a.row_idx, "row_idx")
    _check_shape(a.row_idx, "row_idx", "[T * K]", T * K)
    _check_like(w1, x, "w1", "x")
    _check_like(w2, x, "w2", "x")
    _check_shape(w2, "w2", "[E, D, H]", None, x.shape[1], None)
    E, D, H = w2.shape
    F = 2 * H if gated else H
    _check_shape(w1, "w1", "[E, 2 * H, D]" if gated else "[E, H, D]", E, F, D)
    _check_int32(a.offs, "offs")
    _check_shape(a.offs, "offs", "[E]", E)
    for name, shape, size in (("b1", "[E, 2 * H]" if gated else "[E, H]", F), ("b2", "[E, D]", D)):
        bias = given.get(name)
        if bias is not None:
            _check_like(bias, x, name, "x")
            _check_shape(bias, name, shape, E, size)
    if a.topk_weights is not None:
        if a.topk_weights.dtype not in {x.dtype, x.dtype if x.dtype == torch.float64 else torch.float32}:
            raise RuntimeError(
                f"topk_weights must have the dtype of x ({_dtype(x)}) or float32, but got {_dtype(a.topk_weights)}"
            )
        _check_shape(a.topk_weights, "topk_weights", "[T, K]", T, K)
    if isinstance(a, ExpertMlp):
        return
    # of a backward
    _check_needs(a.needs, "dx, dw1, db1, dw2, db2, dtopk_weights")
    if a.needs[5] and a.topk_weights is None:
        raise RuntimeError("needs asks for the gradient of topk_weights, which is None")
    _check_gradient_mode(
        "a backward of expert_mlp or frozen_mlp", "ops.expert_mlp or fmoe_ext.frozen.frozen_mlp"
    )
    _check_like(a.grad_y, x, "grad_y", "x")
    _check_shape(a.grad_y, "grad_y", "[T, D]" if a.combine else "[R, D]", T if a.combine else T * K, D)


def _check_hidden_rows(
    rows: Tensor, a: ExpertMlpBackward | ExpertMlpBackwardWeights, width: int, name: str, shape: str
) -> None:
    _check_like(rows, a.x, name, "x")
    _check_shape(rows, name, shape, a.row_idx.shape[0], width)


def _check_main_grad(main_grad: Tensor, weight: Tensor, name: str, weight_name: str) -> None:
    wanted = torch.float64 if weight.dtype == torch.float64 else torch.float32
    if main_grad.dtype != wanted:
        described = str(wanted).removeprefix("torch.")
        raise RuntimeError(
            f"{name} must be {described} for {weight_name} of {_dtype(weight)}, but got {_dtype(main_grad)}"
        )
    if main_grad.shape != weight.shape:
        raise RuntimeError(
            f"{name} must have the shape of {weight_name} {list(weight.shape)}, but got shape "
            f"{list(main_grad.shape)}"
        )
    if not main_grad.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous, since it is added to in place")


def _check_needs(needs: list[bool], names: str) -> None:
    wanted = names.count(",") + 1
    if len(needs) != wanted:
        raise RuntimeError(f"needs must have {wanted} entries ({names}), but got {len(needs)}")


def _check_gradient_mode(operators: str, function: str) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{operators} cannot be differentiated: call it under torch.no_grad(), or differentiate "
            f"fmoe_ext.{function}"
        )


def _check_devices(needed: dict[str, Tensor], optional: dict[str, Tensor | None]) -> None:
    for name, given in needed.items():
        if given is None:  # the dispatcher passes None where a C++ kernel would get an undefined tensor
            raise RuntimeError(f"{name} must be a tensor, but got None")
    first, like = next(iter(needed.items()))
    for name, t in (needed | optional).items():
        if t is not None and t.device != like.device:
            raise RuntimeError(f"{name} must be on {like.device} like {first}, but it is on {t.device}")


def _check_shape(t: Tensor, name: str, shape: str, *sizes: int | None) -> None:
    """Raise RuntimeError unless t has these sizes; None stands for any size. shape: how the error names them."""
    if t.dim() != len(sizes):
        raise RuntimeError(f"{name} must have shape {shape}, but got shape {list(t.shape)}")
    for d, size in enumerate(sizes):
        if size is not None and t.shape[d] != size:
            raise RuntimeError(
                f"{name} must have shape {shape} with size {size} in dimension {d}, but got shape {list(t.shape)}"
            )


def _check_float(t: Tensor, name: str) -> None:
    if t.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise RuntimeError(f"{name} must be float64, float32, bfloat16 or float16, but got {_dtype(t)}")


def _check_int32(t: Tensor, name: str) -> None:
    if t.dtype != torch.int32:
        raise RuntimeError(f"{name} must be int32, but got {_dtype(t)}")


def _check_like(t: Tensor, other: Tensor, name: str, other_name: str) -> None:
    if t.dtype != other.dtype:
        raise RuntimeError(
            f"{name} must have the dtype of {other_name} ({_dtype(other)}), but got {_dtype(t)}"
        )


def _dtype(t: Tensor) -> str:
    """Name a dtype as csrc does: Float, BFloat16, Long."""
    return t.type().rsplit(".", 1)[-1].removesuffix("Tensor")
