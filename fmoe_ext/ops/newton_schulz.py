import torch

from fmoe_ext.ops._autograd import register_fake
from fmoe_ext.ops.processor import cpu_isa, fast_bfloat16


def newton_schulz(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """Moves the singular values of each matrix by a polynomial, steps times: x = a x + (b G + c G G) x, G = x x^T.

    x [E, M, N] of one floating dtype, M <= N is cheaper; coefficients (a, b, c) -> [E, M, N]. Every product is summed
    in float32 (double: float64) and rounded to the dtype of x. On the CPU one operator takes each matrix through all
    steps and computes half of G and of the polynomial, which are symmetric. PyTorch computes them on CUDA, in bfloat16
    where fast_bfloat16() and cpu_isa() is not "avx512_bf16", and where x needs a gradient. Raises RuntimeError for
    another shape or dtype.
    Equivalent to: newton_schulz_ref, which is three lines of PyTorch. Muon: Jordan et al. 2024.
    """
    if x.dim() != 3 or not x.is_floating_point() or steps < 0:
        raise RuntimeError(
            f"x must be a floating tensor [E, M, N] and steps at least 0, but got {x.dtype} {list(x.shape)} and {steps}"
        )
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    if x.device.type == "cpu" and not needs_gradient and not _torch_is_faster(x.dtype):
        found: torch.Tensor = torch.ops.fmoe_ext.newton_schulz(x, *coefficients, steps)
        return found
    return newton_schulz_ref(x, coefficients, steps) if steps else x.clone()


def _torch_is_faster(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and fast_bfloat16() and cpu_isa() != "avx512_bf16"


def newton_schulz_ref(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int) -> torch.Tensor:
    """The oracle of newton_schulz: the same in plain PyTorch."""
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


@register_fake("fmoe_ext::newton_schulz", x=3)
def _(x: torch.Tensor, a: float, b: float, c: float, steps: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
