import pytest
import torch

from fmoe_ext.ops import grouped_gemm, grouped_gemm_ref
from fmoe_ext.testing import assert_close

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAMES = ["y", "dx", "dweight", "dbias"]


def make_inputs(R, D, N, offs, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(R, D), (len(offs), N, D), (len(offs), N)]
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    grad = torch.randn(R, N, generator=generator).to(dtype)
    return x, weight, torch.tensor(offs, dtype=torch.int32), bias, grad


def results(function, x, weight, offs, bias, grad, **options):
    y = function(x, weight, offs, bias, **options)
    inputs = [t for t in (x, weight, bias) if t is not None]
    return [y, *torch.autograd.grad(y, inputs, grad)]


def check(x, weight, offs, bias, grad, **options):
    double = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = results(grouped_gemm_ref, double[0], double[1], offs, double[2], grad.double(), **options)
    plain = results(grouped_gemm_ref, x, weight, offs, bias, grad, **options)
    got = results(grouped_gemm, x, weight, offs, bias, grad, **options)
    for name, a, b, c in zip(NAMES, got, truth, plain, strict=False):
        if x.dtype == torch.float64:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        else:
            assert_close(a, b, c, name)


SHAPES = [
    (0, 4, 3, [0, 0]),
    (3, 4, 3, [0, 0]),
    (1, 1, 1, [1]),
    (5, 0, 3, [2, 5]),
    (5, 3, 0, [2, 5]),
    (50, 37, 29, [3, 3, 20, 45]),
    (300, 64, 100, [0, 300]),
    (70, 33, 130, [14, 28, 70]),
    (240, 1030, 40, [200, 240]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_gemm(isa, shape, dtype):
    check(*make_inputs(*shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm_any_number_of_rows_equals_reference(isa, dtype):
    # Every way to divide rows into tiles, with and without packing, over several parts of k.
    rows = [*range(1, 19), 33]
    offs = torch.tensor(rows).cumsum(0).tolist()
    check(*make_inputs(offs[-1], 600, 20, offs, dtype))
    check(*make_inputs(offs[-1], 20, 300, offs, dtype))


def test_no_experts():
    x, weight, offs, bias, _ = make_inputs(5, 3, 4, [2, 5], torch.float32)
    y = grouped_gemm(x, weight[:0], offs[:0], bias[:0])
    assert y.shape == (5, 4) and not y.any()


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    R, D = 2**16 + 3, 2**15
    x = torch.zeros(R, D, dtype=torch.bfloat16)
    x[:, 0] = x[:, -1] = torch.arange(R) % 100
    weight = torch.zeros(2, 1, D, dtype=torch.bfloat16)
    weight[0, 0, 0] = weight[1, 0, -1] = 2
    y = grouped_gemm(x, weight, torch.tensor([R - 64, R], dtype=torch.int32))
    assert torch.equal(y[:, 0].long(), 2 * (torch.arange(R) % 100))


def test_grouped_gemm_expert_over_several_chunks():
    x, weight, offs, bias, grad = make_inputs(40, 4100, 200_000 // 4100, [40], torch.float32)
    check(x, weight, offs, bias, grad)
    check(*make_inputs(5000, 1000, 3, [10, 4990], torch.bfloat16))


def test_without_bias_and_not_contiguous():
    x, weight, offs, _, grad = make_inputs(50, 24, 40, [10, 30, 50], torch.float32)
    column_major = [t.detach().mT.contiguous().mT.requires_grad_() for t in (x, weight)]
    check(*column_major, offs, None, grad)
    check(x, weight[:1].detach().expand(3, -1, -1).requires_grad_(), offs, None, grad[:1].expand(50, -1))


def transposed(x, weight, offs, bias, grad):
    return x, weight.detach().mT.contiguous().requires_grad_(), offs, bias, grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposed(shape, dtype):
    x, weight, offs, bias, grad = transposed(*make_inputs(*shape, dtype))
    check(x, weight, offs, bias, grad, transposed=True)
    check(x, weight, offs, None, grad, transposed=True)


def test_transposed_sums_the_gradient_of_a_bias_exactly():
    """2^24 + 1 is 2^24 in float32: ones that are added to the sum of all rows before them are lost there."""
    x, weight, offs, bias, grad = transposed(*make_inputs(332, 4, 3, [332], torch.float32))
    grad[:32], grad[32:] = 2.0**19, 1.0
    grouped_gemm(x, weight, offs, bias, transposed=True).backward(grad)
    assert torch.equal(bias.grad, torch.full((1, 3), 2.0**24 + 300))


def test_transposed_keeps_the_layout_of_the_weight():
    x, weight, offs, bias, grad = transposed(*make_inputs(50, 24, 40, [10, 30, 50], torch.float32))
    grouped_gemm(x, weight, offs, bias, transposed=True).backward(grad)
    assert weight.grad.is_contiguous() and weight.grad.shape == (3, 24, 40)
    frozen = weight.detach()
    (dx,) = torch.autograd.grad(grouped_gemm(x, frozen, offs, transposed=True), x, grad)
    assert torch.equal(dx, x.grad)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = grouped_gemm(x, weight, offs, bias, transposed=True)
    low = [t.detach().bfloat16() for t in (x, weight, bias)]
    assert torch.equal(y, grouped_gemm(low[0], low[1], offs, low[2], transposed=True))
    (dx,) = torch.autograd.grad(y, x, grad.bfloat16())
    assert dx.dtype == torch.float32 and dx.abs().sum() > 0


def test_transposed_compiles_whole():
    x, weight, offs, bias, grad = transposed(*make_inputs(50, 24, 40, [10, 30, 50], torch.float32))
    compiled = torch.compile(grouped_gemm, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        results(compiled, x, weight, offs, bias, grad, transposed=True),
        results(grouped_gemm, x, weight, offs, bias, grad, transposed=True),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_bitwise_equal_for_any_number_of_threads(isa):
    inputs = make_inputs(700, 200, 150, [300, 300, 650], torch.bfloat16)
    expected = results(grouped_gemm, *inputs)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for a, b in zip(results(grouped_gemm, *inputs), expected, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


def test_infinite_gradients_of_a_bias_are_no_nan():
    """As torch's sums: the row of an infinity, and a sum that leaves the range of float32."""
    x, weight, grad = torch.ones(400, 1), torch.ones(1, 3, 1), torch.ones(400, 3)
    grad[5, 1] = torch.inf
    grad[:40, 2] = 3e38
    bias = torch.zeros(1, 3, requires_grad=True)
    grouped_gemm(x, weight, torch.tensor([400], dtype=torch.int32), bias).backward(grad)
    assert bias.grad.tolist() == [[400, torch.inf, torch.inf]]


def test_gradients():
    x, weight, offs, bias, _ = make_inputs(7, 3, 4, [2, 2, 6], torch.float64)
    assert torch.autograd.gradcheck(
        lambda *args: grouped_gemm(args[0], args[1], offs, args[2]), (x, weight, bias)
    )
    (dx,) = torch.autograd.grad(grouped_gemm(x, weight, offs, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        dx.sum().backward()


def test_opcheck():
    x, weight, offs, bias, grad = make_inputs(7, 3, 4, [2, 2, 6], torch.float32)
    torch.library.opcheck(torch.ops.fmoe_ext.grouped_gemm.default, (x, weight, offs, bias))
    torch.library.opcheck(torch.ops.fmoe_ext.grouped_gemm.default, (x, weight, offs))
    needs = [True, False, True]
    detached = (grad, x.detach(), weight.detach(), offs, needs)
    with torch.no_grad():
        torch.library.opcheck(torch.ops.fmoe_ext.grouped_gemm_backward.default, detached)


def test_autocast():
    x, weight, offs, bias, grad = make_inputs(50, 24, 40, [10, 30, 50], torch.float32)
    with torch.autocast(x.device.type, torch.bfloat16):
        y = grouped_gemm(x, weight, offs, bias)
    low = [t.detach().bfloat16() for t in (x, weight, bias)]
    assert torch.equal(y, grouped_gemm(low[0], low[1], offs, low[2]))
    (dx,) = torch.autograd.grad(y, x, grad.bfloat16())
    assert dx.dtype == torch.float32 and dx.abs().sum() > 0


@pytest.mark.bad_indices
def test_rejects():
    x, weight, offs, bias, _ = make_inputs(6, 3, 4, [2, 6], torch.float32)
    with pytest.raises(RuntimeError, match=r"offs\[1\] is 1 after 2"):
        grouped_gemm(x, weight, torch.tensor([2, 1], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"number of rows 6, but offs\[1\] is 7"):
        grouped_gemm(x, weight, torch.tensor([2, 7], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="offs must be int32, but got Long"):
        grouped_gemm(x, weight, offs.long())
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E, N, D\] with size 3 in dimension 2"):
        grouped_gemm(x, weight[:, :, :2], offs)
    with pytest.raises(RuntimeError, match="bias must have the dtype of x"):
        grouped_gemm(x, weight, offs, bias.double())
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E, D, N\] with size 3 in dimension 1"):
        grouped_gemm(x, weight, offs, transposed=True)
    with pytest.raises(
        RuntimeError, match=r"bias must have the dtype of x.* shape \[E, N\] = \[2, 4\], but got"
    ):
        grouped_gemm(x, weight.mT, offs, bias.double(), transposed=True)
    with pytest.raises(RuntimeError, match='unknown instruction set "mmx"'):
        torch.ops.fmoe_ext._set_cpu_isa("mmx")


def test_grouped_gemm_without_gradient_of_x_keeps_no_weight():
    x, weight, offs, bias, grad = make_inputs(6, 3, 4, [2, 6], torch.float32)
    expected = results(grouped_gemm, x, weight, offs, bias, grad)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = grouped_gemm(x.detach(), weight, offs, bias)
    assert all(t.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr() for t in kept)
    assert sum(t.untyped_storage().nbytes() for t in kept if t.shape == weight.shape) <= 4
    grads = torch.autograd.grad(y, [weight, bias], grad)
    assert torch.equal(y, expected[0])
    assert torch.equal(grads[0], expected[2]) and torch.equal(grads[1], expected[3])
