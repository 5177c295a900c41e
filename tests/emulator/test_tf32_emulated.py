"""float32 rounded to TF32: the values, and that it is done where torch allows it and nowhere else."""

import pytest
import torch
from gemm_cases import chosen

from fmoe_ext import ops
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.gpu import tf32
from fmoe_ext.ops.expert_mlp import activation_number
from fmoe_ext.testing import assert_close

OFFS = (3, 3, 133)  # the second expert has no rows, the third two tiles of them
MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def asks_torch(emulated):
    library = gpu_kernels.ask_torch_about_tf32("fmoe_ext_emu")
    emulated.set_device(80, 3)
    yield
    emulated._set_gpu_kernels(emulated._gpu_kernels())
    del library


@pytest.fixture
def precision():
    """Put the precision back that a test has set."""
    yield
    torch.set_float32_matmul_precision("highest")
    for module in (torch.backends.mkldnn.matmul, MATMUL, torch.backends):
        module.fp32_precision = "none"


def rounded(t):
    """To the nearest number with 10 bits after the point, ties away from zero; by arithmetic, in float64."""
    mantissa, exponent = torch.frexp(t.double())
    return torch.ldexp((mantissa.abs() * 2048 + 0.5).floor().copysign(mantissa) / 2048, exponent)


def test_rounding():
    last = 2.0**-10  # the last place of numbers from 1 to 2
    t = torch.tensor([0.0, 1.0, 1 + last / 2, 1 + last * 0.499, 1 + last * 1.5, 2 - last / 4, 3e-39])
    expected = torch.tensor([0.0, 1.0, 1 + last, 1.0, 1 + 2 * last, 2.0, 3e-39])
    assert torch.equal(tf32.rounded(t)[:-1], expected[:-1]) and torch.equal(
        tf32.rounded(-t), -tf32.rounded(t)
    )
    many = torch.randn(10000)
    assert torch.equal(tf32.rounded(many).double(), rounded(many))


def inputs(D, N, bias=True):
    generator = torch.Generator().manual_seed(0)
    E, R = len(OFFS), OFFS[-1] + 2
    shapes = ((R, D), (E, N, D), (E, N), (R, N))
    x, weight, shift, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, weight, torch.tensor(OFFS, dtype=torch.int32), shift if bias else None, grad


def products(x, weight, offs, bias, grad):
    """y, dx and dweight of grouped_gemm from operands in float64."""
    y, dx, dweight = torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight)
    begin = 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(begin, end)
        y[rows], dx[rows] = x[rows] @ weight[e].mT + bias[e], grad[rows] @ weight[e]
        dweight[e] = grad[rows].mT @ x[rows]
        begin = end
    return y, dx, dweight


@pytest.mark.parametrize("sizes", [(24, 40), (37, 3), (160, 136)])
def test_values(emulated, sizes):
    """Products of operands that are rounded before they are multiplied, neither cut off nor whole."""
    x, weight, offs, bias, grad = inputs(*sizes)
    with tf32.tf32(True):
        y = emulated.grouped_gemm(x, weight, offs, bias)
        dx, dweight, dbias = emulated.grouped_gemm_backward(grad, x, weight, offs, [True] * 3)
    expected = products(
        *(t if t is offs else rounded(t) for t in (x, weight, offs)), bias.double(), rounded(grad)
    )
    for ours, true in zip((y, dx, dweight), expected, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(dbias[0], grad[:3].sum(0))  # no product


def test_main_gradient(emulated):
    x, weight, offs, _, grad = inputs(40, 24)
    main = torch.randn(weight.shape)
    expected = (
        main.double() + products(*map(rounded, (x, weight)), offs, weight[:, :, 0] * 0, rounded(grad))[2]
    )
    with tf32.tf32(True):
        emulated.grouped_gemm_backward_accumulate(grad, x, weight, offs, [False, True, False], main)
    torch.testing.assert_close(main.double(), expected, rtol=2e-5, atol=2e-5)


def test_expert_mlp(emulated):
    """All five products, each by its kernel, with the errors of plain PyTorch on rounded matrices."""
    generator = torch.Generator().manual_seed(0)
    T, K, E, D, H = 60, 2, 4, 24, 40
    index = ops.sort_tokens_ref(torch.randint(-1, E, (T, K), generator=generator), E)
    rows, options = (index.row_idx, index.inverse, index.offs), (activation_number("swiglu"), True)
    shapes = ((T, D), (E, 2 * H, D), (E, D, H), (T, D))
    x, w1, w2, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    weights = torch.rand(T, K, generator=generator)

    def reference(convert):
        leaves = [convert(t).detach().requires_grad_() for t in (x, w1, w2)]
        leaves.append(weights.to(leaves[0].dtype).requires_grad_())
        y = ops.expert_mlp_ref(leaves[0], *rows, leaves[1], None, leaves[2], None, leaves[3], "swiglu")
        return [y.detach(), *torch.autograd.grad(y, leaves, convert(grad))]

    def ours():
        y, h = emulated.expert_mlp(x, *rows, w1, None, w2, None, weights, *options, True)
        needs = [True, True, False, True, False, True]
        grads = emulated.expert_mlp_backward(grad, x, *rows, w1, w2, None, weights, h, *options, needs)
        found.append([y, *(t for t, needed in zip(grads, needs, strict=True) if needed)])

    found = []
    with tf32.tf32(True):
        kernels = chosen(emulated, ours)
    products = ("up", "rows_by_weight", "grad_hidden", "grad_input", "grad_weight")
    assert kernels == [f"{product}.tf32" for product in products]
    for one, true, plain in zip(
        found[0], reference(torch.Tensor.double), reference(tf32.rounded), strict=True
    ):
        assert_close(one, true, plain)


def allow(value):
    MATMUL.fp32_precision = value


@pytest.mark.parametrize(
    ("say", "allowed"),
    [
        (lambda: None, False),  # torch's default
        (lambda: allow("ieee"), False),
        (lambda: allow("tf32"), True),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), True),
        (lambda: torch.set_float32_matmul_precision("high"), True),
        (lambda: torch.set_float32_matmul_precision("highest"), False),
        (lambda: (allow("tf32"), allow("ieee")), False),  # it is asked anew
    ],
)
def test_only_where_torch_allows_it(emulated, precision, say, allowed):
    x, weight, offs, bias, grad = inputs(24, 40)
    whole = emulated.grouped_gemm(x, weight, offs, bias)
    say()
    assert gpu_kernels.tf32_allowed() == allowed
    assert torch.equal(emulated.grouped_gemm(x, weight, offs, bias), whole) != allowed
    expected = ["rows_by_weight.tf32"] if allowed else []
    assert chosen(emulated, emulated.grouped_gemm, x, weight, offs, bias) == expected
    needs = [True, True, True]
    used = chosen(emulated, emulated.grouped_gemm_backward, grad, x, weight, offs, needs)
    assert used == (["grad_input.tf32", "grad_weight.tf32"] if allowed else [])


@pytest.mark.parametrize(("dtype", "sm"), [(torch.float64, 80), (torch.bfloat16, 80), (torch.bfloat16, 90)])
def test_other_dtypes_are_left_alone(emulated, dtype, sm):
    emulated.set_device(sm, 3)
    x, weight, offs, bias, _ = (t if t.dtype == torch.int32 else t.to(dtype) for t in inputs(24, 40))
    whole = emulated.grouped_gemm(x, weight, offs, bias)
    with tf32.tf32(True):
        assert torch.equal(emulated.grouped_gemm(x, weight, offs, bias), whole)
        used = chosen(emulated, emulated.grouped_gemm, x, weight, offs, bias)
    assert not any(map(gpu_kernels.is_tf32, used))


def test_kernels_that_are_off(emulated):
    """Unproved kernels compute in whole float32 although torch would allow less."""
    x, weight, offs, bias, _ = inputs(24, 40)
    whole = emulated.grouped_gemm(x, weight, offs, bias)
    emulated._set_gpu_kernels([name for name in emulated._gpu_kernels() if not gpu_kernels.is_tf32(name)])
    with tf32.tf32(True):
        assert torch.equal(emulated.grouped_gemm(x, weight, offs, bias), whole)


@pytest.mark.parametrize("sm", [89, 90, 120])
def test_on_every_device_from_8_0(emulated, sm):
    emulated.set_device(sm, 3)
    x, weight, offs, _, _ = inputs(24, 40)
    with tf32.tf32(True):
        assert chosen(emulated, emulated.grouped_gemm, x, weight, offs, None) == ["rows_by_weight.tf32"]


def test_nan_and_infinity_stay(emulated):
    x, weight, offs = torch.ones(2, 8), torch.ones(1, 8, 8), torch.tensor([2], dtype=torch.int32)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    x.view(torch.int32)[0, 3] = 0x7FFFFFFF  # the NaN that CUDA makes: adding half a place would make it -0
    with tf32.tf32(True):
        y = emulated.grouped_gemm(x, weight, offs, None)
    assert y[0].isnan().all() and y[1].isposinf().all()
