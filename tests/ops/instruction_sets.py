"""The instruction sets that the CPU kernels are compiled for."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

ISAS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16", "neon", "neon_bf16")
LIMIT = os.environ.get("FMOE_CPU_ISA", "").strip() or None
ALLOWED = ISAS if LIMIT is None else ISAS[: ISAS.index(LIMIT) + 1]


def use(name: str) -> None:
    """Limits the kernels to this instruction set; skips the test where it cannot run."""
    if name not in ALLOWED:
        pytest.skip(f"this run is limited by FMOE_CPU_ISA={LIMIT}")
    if not torch.ops.fmoe_ext._set_cpu_isa(name):
        pytest.skip(f"this processor has no {name}")


@contextmanager
def restored() -> Iterator[None]:
    """Restores the instruction set afterwards."""
    before = torch.ops.fmoe_ext._cpu_isa()
    try:
        yield
    finally:
        torch.ops.fmoe_ext._set_cpu_isa(before)
