"""Shared parts of the fuzz tests: settings of hypothesis, layouts of memory, random choices and experts."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = settings(  # as many as the profile says: tests/conftest.py
    derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

sizes = st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 20))  # T, K, E
seeds = st.integers(0, 2**31 - 1)
layouts = st.sampled_from(["contiguous", "transposed", "strided", "expanded", "overlapping"])


def generator(seed):
    return torch.Generator().manual_seed(seed)


def restride(t, layout):
    """A tensor [m, n] of values of t, laid out in another way; the last two layouts repeat some of the values."""
    if layout == "transposed":
        return t.t().contiguous().t()
    if layout == "strided":
        return torch.stack([t, t], dim=-1)[..., 1]
    if t.numel() == 0:
        return t
    if layout == "expanded":
        return t[:1].expand_as(t)
    if layout == "overlapping":
        return t.flatten()[: sum(t.shape) - 1].clone().as_strided(t.shape, (1, 1))
    return t


def choices(size, seed, dtype=torch.int64, layout="contiguous"):
    """topk_idx [T, K], some of them dropped."""
    T, K, E = size
    return restride(torch.randint(-1, E, (T, K), generator=generator(seed), dtype=dtype), layout)


def close(ours, expected, tolerance=None, name=""):
    tolerance = TOLERANCES[ours.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(
        ours, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def assert_raises(names, call):
    """call() raises a RuntimeError that names one of the arguments and says what it must be."""
    with pytest.raises(RuntimeError, match=rf"\b({'|'.join(names)})\b.* (must|known are|is only|which is)"):
        call()
