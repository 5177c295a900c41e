"""newton_schulz: the polynomial that orthogonalises the matrices of Muon's steps.

With x = U S V^T, x x^T x = U S^3 V^T: a polynomial of odd powers of x acts on each singular value alone. The step
s -> a s + b s^3 + c s^5, repeated, moves every s in (0, 1] near 1, so that x comes near U V^T.
"""

from typing import Any, Final

import torch
from torch.autograd.forward_ad import unpack_dual

from fmoe_ext.ops._autograd import is_transformed, register_autograd, register_fake
from fmoe_ext.ops.processor import cpu_isa, fast_bfloat16

_MAX_STEPS: Final = 1000  # Muon takes 5; the operator's own bound


def newton_schulz(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Move the singular values of each matrix by a polynomial, steps times: x = a x + (b G + c G G) x, G = x x^T.

    x [E, M, N] of one floating dtype, M <= N is cheaper; coefficients (a, b, c) -> [E, M, N]. Every product is summed
    in float32 (double: float64) and rounded to the dtype of x. On the CPU one operator takes each matrix through all
    steps and computes half of G and of the polynomial, which are symmetric. PyTorch computes them on CUDA, in bfloat16
    where fast_bfloat16() and cpu_isa() is not "avx512_bf16", and where x has a gradient, a tangent or a transform of
    torch.func. Raises RuntimeError for another shape or dtype, and for more than 1,000 steps.
    Equivalent to: newton_schulz_ref, which is three lines of PyTorch. Muon: Jordan et al. 2024.

    Example:

        >>> x = torch.randn(1, 8, 8)
        >>> y = newton_schulz(x / x.norm(), (1.5, -0.5, 0.0), steps=30)  # all singular values go to 1
        >>> torch.allclose(y @ y.mT, torch.eye(8), atol=1e-2)
        True
    """
    if x.dim() != 3 or not x.is_floating_point() or not 0 <= steps <= _MAX_STEPS:
        raise RuntimeError(
            f"x must be a floating tensor [E, M, N] and steps in [0, {_MAX_STEPS}], but got {x.dtype} {list(x.shape)} "
            f"and {steps}"
        )
    # torch uses AMX and bfdot, which the operator's kernels do not
    torch_is_faster = x.dtype == torch.bfloat16 and fast_bfloat16() and cpu_isa() != "avx512_bf16"
    # PyTorch computes every derivative: backward, forward and by torch.func
    is_differentiated = (torch.is_grad_enabled() and x.requires_grad) or unpack_dual(x).tangent is not None
    if x.device.type != "cpu" or torch_is_faster or is_differentiated or is_transformed(x):
        return newton_schulz_ref(x, coefficients, steps) if steps else x.clone()
    found: torch.Tensor = torch.ops.fmoe_ext.newton_schulz(x, *coefficients, steps)
    return found


def newton_schulz_ref(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Compute newton_schulz in plain PyTorch: its oracle."""
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT  # G
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@register_fake("fmoe_ext::newton_schulz", x=3)
def _(x: torch.Tensor, a: float, b: float, c: float, steps: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *ctx.coefficients, ctx.steps = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Serve those who call the operator itself: PyTorch computes all steps again, with their gradients."""
    (x,) = ctx.saved_tensors
    is_differentiated_again = torch.is_grad_enabled()
    with torch.enable_grad():
        y = newton_schulz_ref(x, tuple(ctx.coefficients), ctx.steps)
    (dx,) = torch.autograd.grad(y, x, grad, create_graph=is_differentiated_again)
    return dx, None, None, None, None


register_autograd("fmoe_ext::newton_schulz", _backward, _setup_context, places=(0,))
