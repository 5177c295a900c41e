"""The kernels of FMOE_GPU_KERNELS=torch: everything that grouped_gemm and expert_mlp can be asked for.

On CPU tensors, and with --device cuda on the GPU.
`pytest --device torch` runs all tests of operators and layers through them.
"""

from types import SimpleNamespace

import pytest
import torch

from fmoe_ext.gpu import torch_path
from fmoe_ext.ops import MainGrad, expert_mlp, grouped_gemm
from fmoe_ext.ops.expert_mlp import ACTIVATIONS
from tests.ops import test_expert_mlp, test_grouped_gemm, test_main_grad, test_split_backward

DTYPES = test_expert_mlp.DTYPES
Problem = test_expert_mlp.Problem


def install():
    return torch_path.install(torch.empty(0).device.type.upper())


@pytest.fixture(autouse=True)
def in_their_place(monkeypatch):
    calls = []
    multiply = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch_path.F, "grouped_mm", lambda *a, **k: calls.append(1) or multiply(*a, **k))
    installed = [install()]
    yield SimpleNamespace(calls=calls, installed=installed)
    installed.clear()


def test_takes_the_place_of_our_kernels_and_gives_it_back(in_their_place):
    x, weight, offs, bias, _ = test_grouped_gemm.make_inputs(9, 16, 24, [4, 9], torch.bfloat16)
    grouped_gemm(x, weight, offs, bias)
    assert len(in_their_place.calls) == 1
    in_their_place.installed.clear()
    grouped_gemm(x, weight, offs, bias)
    assert len(in_their_place.calls) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", test_grouped_gemm.SHAPES, ids=str)
def test_grouped_gemm_shapes(shape, dtype):
    inputs = test_grouped_gemm.make_inputs(*shape, dtype)
    test_grouped_gemm.check(*inputs)
    test_grouped_gemm.check(*test_grouped_gemm.transposed(*inputs), transposed=True)
    x, weight, offs, _, grad = inputs
    test_grouped_gemm.check(x, weight, offs, None, grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    Problem(60, 3, 5, 37, 29, dtype, activation).check()
    Problem(60, 2, 3, 32, 48, dtype, activation, bias=False, weights=False, combine=False).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("shape", test_expert_mlp.SHAPES, ids=str)
def test_expert_mlp_shapes(shape, combine, dtype):
    test_expert_mlp.test_shapes(shape, combine, dtype)


def test_no_experts_one_with_all_and_none_chosen():
    test_expert_mlp.test_no_experts()
    test_expert_mlp.test_one_expert_gets_all_and_every_choice_dropped()
    test_grouped_gemm.test_no_experts()


def test_float32_weights_and_strided_inputs():
    test_expert_mlp.test_weights_in_float32()
    test_expert_mlp.test_not_contiguous()
    test_grouped_gemm.test_without_bias_and_not_contiguous()


@pytest.mark.parametrize("offset", [1, 4])
def test_matrices_that_are_not_aligned(offset):
    x, weight, offs, bias, grad = test_grouped_gemm.make_inputs(50, 24, 40, [10, 30, 50], torch.bfloat16)
    expected = test_grouped_gemm.results(grouped_gemm, x, weight, offs, bias, grad)

    def shifted(t):
        copy = t.new_empty(t.numel() + offset)[offset:].view(t.shape)
        return copy.copy_(t.detach()).requires_grad_()

    moved = [shifted(t) for t in (x, weight, bias)]
    got = test_grouped_gemm.results(grouped_gemm, moved[0], moved[1], offs, moved[2], shifted(grad).detach())
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])
@pytest.mark.parametrize("combine", [True, False])
def test_gradients(activation, combine):
    test_expert_mlp.test_gradients(activation, combine)


@pytest.mark.parametrize("wanted", test_expert_mlp.NAMES)
def test_one_gradient_alone(wanted):
    test_expert_mlp.test_one_gradient_alone(wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", [True, False])
def test_backward_in_two_halves(combine, dtype):
    test_split_backward.test_expert_mlp_same_bits((60, 3, 5, 37, 29), "swiglu", combine, dtype)
    test_split_backward.test_expert_mlp_same_bits((0, 2, 3, 4, 5), "gelu", combine, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_gradients(dtype):
    if dtype.itemsize > 2:  # a product in 16 bits is rounded before it is added
        test_main_grad.test_grouped_gemm_is_as_exact_as_its_main_gradient(dtype)
    fused = test_main_grad.Fused(60, 3, 5, 37, 29, dtype)
    expected = fused.problem.results(expert_mlp)
    fused.backward(fused.forward())
    for name in ("w1", "w2"):
        got = getattr(fused, name).main_grad.to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected[name], rtol=2 * eps, atol=8 * eps)


def test_main_gradients_multiply_16_bits(monkeypatch):
    """Of float32 torch makes a loop over the experts that waits for the device."""
    multiplied = []
    multiply = torch_path.F.grouped_mm
    monkeypatch.setattr(
        torch_path.F, "grouped_mm", lambda a, *b, **k: multiplied.append(a.dtype) or multiply(a, *b, **k)
    )
    fused = test_main_grad.Fused(60, 3, 5, 40, 24, torch.bfloat16)
    fused.backward(fused.forward())
    assert len(multiplied) >= 6 and set(multiplied) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [0.5, float("nan")])
def test_experts_without_rows_leave_main_gradients_alone(fill, dtype):
    test_main_grad.test_experts_without_rows_leave_it_alone(dtype, fill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_path_padding_has_no_effect(dtype):
    """Rows at or after offs[-1] and dropped choices may hold anything: infinities do not spread."""
    x, weight, offs, bias, grad = test_grouped_gemm.make_inputs(50, 24, 40, [3, 3, 20, 45], dtype)
    expected = test_grouped_gemm.results(grouped_gemm, x, weight, offs, bias, grad)
    with torch.no_grad():
        x[45:], grad[45:] = torch.inf, torch.nan
    for one, other in zip(
        test_grouped_gemm.results(grouped_gemm, x, weight, offs, bias, grad), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("offs", [[5, 2, 90], [-4, 3, 3], [2**31 - 1, 0, 0]], ids=str)
def test_garbage_indices_touch_nothing_outside(offs):
    """As the CUDA kernels: an index out of range is a dropped choice, ranges are clamped."""
    x, weight = torch.randn(6, 8), torch.randn(3, 8, 8)
    assert grouped_gemm(x, weight, torch.tensor(offs, dtype=torch.int32)).isfinite().all()
    row_idx = torch.tensor([3, -9, 2**31 - 1, 0, 1, 7], dtype=torch.int32)
    inverse = torch.tensor([[0], [1], [2**31 - 1], [-5], [4], [5]], dtype=torch.int32)
    ends = torch.tensor(offs, dtype=torch.int32)
    leaf = x.requires_grad_()
    for combine in (True, False):
        y = expert_mlp(
            leaf, row_idx, inverse, ends, weight, None, weight, None, torch.rand(6, 1), "relu", combine
        )
        assert y.isfinite().all()
        assert torch.autograd.grad(y.sum(), leaf)[0].isfinite().all()


@torch.no_grad()
def test_rejects_as_our_kernels_do():
    x, weight, offs = torch.zeros(4, 8), torch.zeros(2, 3, 7), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E, N, D\].*got shape \[2, 3, 7\]"):
        grouped_gemm(x, weight, offs)
    with pytest.raises(RuntimeError, match="weight must be a tensor, but got None"):
        grouped_gemm(x, None, offs)
    index = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32), offs)
    with pytest.raises(RuntimeError, match='unknown activation "tanh"'):
        expert_mlp(x, *index, weight, None, weight, None, activation="tanh")
    good = torch.zeros(2, 3, 8)
    with pytest.raises(RuntimeError, match="needs must have 3 entries"):
        torch.ops.fmoe_ext.grouped_gemm_backward(x[:, :3], x, good, offs, [True])
    main = torch.zeros(2, 3, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="main_dweight must be float32"):
        torch.ops.fmoe_ext.grouped_gemm_backward(x[:, :3], x, good, offs, [True] * 3, main)
    with pytest.raises(RuntimeError, match=r"main_dweight must be on .* like x, but it is on meta"):
        torch_path.grouped_gemm_backward(x[:, :3], x, good, offs, [True] * 3, main.float().to("meta"))


def test_main_grad_of_a_slice():
    weight = test_main_grad.parameter(torch.randn(4, 40, 24))
    x, _, offs, _, grad = test_grouped_gemm.make_inputs(50, 24, 40, [10, 50], torch.float32)
    grouped_gemm(x, weight[1:3], offs, main_grad=MainGrad(weight, 1, 3)).backward(grad)
    assert not weight.main_grad[[0, 3]].any() and weight.main_grad[1:3].any((1, 2)).all()
