"""The instruction sets that the CPU kernels are compiled for."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "neon", "neon_bf16")


def use(name: str) -> None:
    """Lets the kernels use no more than this one; skips the test where the processor lacks it."""
    if not torch.ops.fmoe_ext._set_cpu_isa(name):
        pytest.skip(f"this processor has no {name}")


@contextmanager
def restored() -> Iterator[None]:
    """The best one again afterwards."""
    try:
        yield
    finally:
        for name in ISAS:
            torch.ops.fmoe_ext._set_cpu_isa(name)
