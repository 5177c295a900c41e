"""TF32: float32 with 10 bits after the point. Torch's leave to use it, and the rounding."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOST = 13  # bits of a float32's mantissa that TF32 lacks


def rounded(t: Tensor) -> Tensor:
    """t, finite float32, to the nearest TF32, ties away from zero, as kernels round what they multiply."""
    return (t.view(torch.int32) + (1 << LOST - 1) & -1 << LOST).view(torch.float32)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """torch.backends.cuda.matmul.fp32_precision is "tf32" or "ieee" inside the block, afterwards what it was."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
