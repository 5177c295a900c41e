"""newton_schulz: each matrix by its float64 truth, on every instruction set and for any number of threads."""

import sys

import pytest
import torch

from fmoe_ext.ops import newton_schulz, newton_schulz_ref
from fmoe_ext.testing import assert_close

pytestmark = pytest.mark.cpu("on CUDA torch computes it")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MUON = (3.4445, -4.7750, 2.0315)
SHAPES = [(0, 3, 4), (2, 0, 4), (1, 1, 1), (3, 5, 7), (2, 33, 65), (5, 70, 31), (1, 130, 200)]


def stack(*shape, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)).to(dtype)


@pytest.fixture(autouse=True)
def our_operator(monkeypatch):
    """On a processor where PyTorch is faster too."""
    monkeypatch.setattr(sys.modules["fmoe_ext.ops.newton_schulz"], "fast_bfloat16", lambda: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_are_as_exact_as_those_of_pytorch(isa, shape, dtype):
    x = stack(*shape, dtype=dtype)
    before = x.clone()
    found = newton_schulz(x, MUON, 3)
    assert torch.equal(x, before)
    truth = newton_schulz_ref(x.double(), MUON, 3)
    if dtype == torch.float64:
        return torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    assert_close(found, truth, newton_schulz_ref(x, MUON, 3))


def test_rounding_is_that_of_pytorch():
    """Sums of float32 in another order, so that a few numbers round to a neighbour."""
    x = stack(4, 48, 80, dtype=torch.bfloat16)
    found, expected = newton_schulz(x, MUON, 1), newton_schulz_ref(x, MUON, 1)
    assert (found != expected).float().mean() < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-10)


def test_columns_of_a_transposed_stack_are_read_as_they_lie():
    x = stack(3, 40, 24, dtype=torch.bfloat16).mT
    assert torch.equal(newton_schulz(x, MUON, 2), newton_schulz(x.contiguous(), MUON, 2))


def test_bits_depend_neither_on_threads_nor_on_the_other_matrices():
    x = stack(3, 70, 130, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = newton_schulz(x, MUON, 2)
        for number in (2, 5):  # a matrix for each thread; matrices that the threads share
            torch.set_num_threads(number)
            assert torch.equal(newton_schulz(x, MUON, 2), expected)
            assert torch.equal(newton_schulz(x[1:2], MUON, 2), expected[1:2])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa_of_processor, is_ours", [("avx512_bf16", True), ("avx512_vnni", False)])
def test_bfloat16_is_left_to_pytorch_where_only_it_is_fast(monkeypatch, isa_of_processor, is_ours):
    module = sys.modules["fmoe_ext.ops.newton_schulz"]
    monkeypatch.setattr(module, "fast_bfloat16", lambda: True)
    monkeypatch.setattr(module, "cpu_isa", lambda: isa_of_processor)
    x = stack(2, 20, 30, dtype=torch.bfloat16)
    ours = x.clone()
    monkeypatch.setattr(torch.ops.fmoe_ext, "newton_schulz", lambda *args: ours)
    found = newton_schulz(x, MUON, 2)
    assert torch.equal(found, ours if is_ours else newton_schulz_ref(x, MUON, 2))


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_no_steps_copy(needs_gradient):
    x = stack(2, 3, 4).requires_grad_(needs_gradient)
    found = newton_schulz(x, MUON, 0)
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()


def test_values_that_are_not_finite_stay_in_their_matrix():
    x = stack(3, 20, 40)
    x[1, 2, 3] = torch.nan
    found = newton_schulz(x, MUON, 2)
    assert found[1].isnan().any() and found[[0, 2]].isfinite().all()


def test_gradient_of_a_stack_is_that_of_pytorch():
    x = stack(2, 4, 6, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, MUON, 2), x)


def test_fake_kernel_has_the_shape_of_the_result():
    torch.library.opcheck(torch.ops.fmoe_ext.newton_schulz.default, (stack(2, 5, 7), *MUON, 2))


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype", "steps"),
    [((3, 4), torch.float32, 1), ((1, 3, 4), torch.int32, 1), ((1, 3, 4), torch.float32, -1)],
)
def test_refused(shape, dtype, steps, needs_gradient):
    x = torch.zeros(shape, dtype=dtype).requires_grad_(needs_gradient and dtype.is_floating_point)
    message = rf"but got {dtype} \[{', '.join(map(str, shape))}\] and {steps}$"
    with pytest.raises(RuntimeError, match=message):
        newton_schulz(x, MUON, steps)
    with pytest.raises(RuntimeError, match=r"x must|steps must"):
        torch.ops.fmoe_ext.newton_schulz(x.detach(), *MUON, steps)
