"""frozen_gemm: grouped_gemm with packed weights."""

from dataclasses import replace

import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.frozen import FORMATS, Quantized, frozen_gemm, frozen_gemm_ref
from fmoe_ext.frozen.formats import GGUF
from fmoe_ext.frozen.frozen_gemm import composed
from fmoe_ext.testing import assert_close
from tests.ops.test_quantized import BLOCKS, packed
from tests.sweeps import OPCHECKED, rest_is_long

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def problem(name, counts, dtype, out=37, width=256, spare=0, seed=0):
    """(x, weight, offs, bias, gradient of y) of experts with these numbers of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts) + spare
    x = torch.randn(rows, width, generator=generator).to(dtype)
    bias = torch.randn(len(counts), out, generator=generator).to(dtype)
    grad = torch.randn(rows, out, generator=generator).to(dtype)
    offs = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return x, packed(name, len(counts), out, width, seed), offs, bias, grad


def results(function, x, weight, offs, bias, grad, dtype=None):
    """y and the gradients of x and bias, computed in a dtype."""
    x, bias, grad = (t.detach().to(dtype or t.dtype) for t in (x, bias, grad))
    x.requires_grad_(), bias.requires_grad_()
    y = function(x, weight, offs, bias)
    return y.detach(), *torch.autograd.grad(y, (x, bias), grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_gradients(isa, name, dtype):
    """Experts with no row, with few, which are decoded in registers or in rows, and with many, decoded in panels."""
    given = problem(name, (1, 0, 3, 9, 40), dtype, spare=2)
    truth, plain = results(frozen_gemm_ref, *given, torch.float64), results(frozen_gemm_ref, *given)
    for got, expected, reference in zip(results(frozen_gemm, *given), truth, plain, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        else:
            assert_close(got, expected, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_weight_without_columns_gives_the_bias(isa, name, dtype):
    wide = packed(name, 1, 37, 256)
    scale, zero = wide.scale, wide.zero
    if scale is not None:
        scale = scale[:, :, : name in ("int4", "nf4")]  # these have at least one group
    if name == "int4":
        zero = torch.zeros(1, 5, 1, dtype=torch.int32)
    weight = replace(wide, data=wide.data[:, :, :0], scale=scale, zero=zero)
    for rows in (1, 3, 9, 40):
        x, bias = torch.ones(rows, 256, dtype=dtype), torch.linspace(-2, 2, 37)[None].to(dtype)
        frozen_gemm(x, wide, None, bias)  # whose sums lie where the next call has its own
        assert torch.equal(frozen_gemm(x[:, :0], weight, None, bias), bias.expand(rows, -1)), rows


@pytest.mark.parametrize("name", FORMATS)
def test_identity_gives_the_decoded_weight(isa, name):
    out, width = 261, 256
    weight = packed(name, 1, out, width, seed=3)
    values = weight.dequantize()[0]
    for rows in (width, 20, 5, 4, 1):
        assert torch.equal(frozen_gemm(torch.eye(width)[-rows:], weight), values.T[-rows:]), rows
    for rows in (out, 7):
        x = torch.zeros(rows, width, requires_grad=True)
        (gradient,) = torch.autograd.grad(frozen_gemm(x, weight), x, torch.eye(out)[-rows:])
        assert torch.equal(gradient, values[-rows:]), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_blocks", [1, 3, 4, 5])
@pytest.mark.parametrize("name", GGUF)
def test_rows_of_any_number_of_blocks(isa, name, num_blocks, dtype):
    """One row, few and many, and the gradient of x."""
    width, out = num_blocks * BLOCKS[name][0], 19
    weight = packed(name, 1, out, width, seed=4)
    values, eye = weight.dequantize(dtype)[0], torch.eye(width, dtype=dtype)
    for rows in (width, 5, 1):
        for begin in (0, width // 2 - 1, width - rows):
            found = frozen_gemm(eye[begin : begin + rows], weight)
            assert torch.equal(found, values.T[begin : begin + rows]), (rows, begin)
    x = torch.zeros(out, width, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(frozen_gemm(x, weight), x, torch.eye(out, dtype=dtype))
    assert torch.equal(gradient, values)


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_without_offs_one_expert_has_all_rows(rows):
    x, weight, offs, bias, grad = problem("q8_0", (rows,), torch.float32)
    expected = results(frozen_gemm, x, weight, offs, bias, grad)
    for got, wanted in zip(results(frozen_gemm, x, weight, None, bias, grad), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(frozen_gemm_ref(x, weight), frozen_gemm_ref(x, weight, offs))


def test_interleaved_rows_have_their_bias_in_their_order():
    x, plain, offs, bias, grad = problem("mxfp4", (3, 20), torch.float64, out=38)
    order = torch.arange(38).view(2, 19).T.flatten()  # gate 0, up 0, gate 1, ...
    in_turn = Quantized("mxfp4", plain.data[:, order], plain.scale[:, order], interleaved=True)
    expected = results(frozen_gemm, x, plain, offs, bias, grad)
    found = results(frozen_gemm, x, in_turn, offs, bias[:, order], grad)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2][:, order])


def test_backward_keeps_packed_bytes_and_no_input():
    x, weight, offs, bias, _ = problem("q4_k", (9, 3), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_gemm(x.requires_grad_(), weight, offs, bias)
    kept = [t for t in kept if t.numel()]  # without the ticket of a decoded copy
    assert {t.data_ptr() for t in kept} == {weight.data.data_ptr(), offs.data_ptr()}


@pytest.mark.parametrize("name", rest_is_long(FORMATS, OPCHECKED))
def test_opcheck(name):
    x, weight, offs, bias, grad = problem(name, (2, 9), torch.float64, out=22)
    packing = weight.packing()
    x.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(torch.ops.fmoe_ext.frozen_gemm, (x, weight.rows(), offs, bias, *packing, False))
    grad.requires_grad_()
    torch.library.opcheck(torch.ops.fmoe_ext.frozen_gemm, (grad, weight.rows(), offs, None, *packing, True))


def test_gradcheck():
    x, weight, offs, bias, _ = problem("q8_0", (2, 5), torch.float64, out=5, width=32)
    x.requires_grad_(), bias.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, bias: frozen_gemm(x, weight, offs, bias), (x, bias))
    # squared, for a product has no second derivative of its own
    assert torch.autograd.gradgradcheck(lambda x: frozen_gemm(x, weight, offs, bias).square(), (x,))


@pytest.mark.parametrize("name", FORMATS)
def test_composition_for_other_devices_equals_the_kernel(name):
    x, weight, offs, bias, grad = problem(name, (2, 0, 9), torch.float64)
    packing = weight.packing()
    y, dx, _ = results(frozen_gemm, x, weight, offs, bias, grad)
    torch.testing.assert_close(composed(x, weight.rows(), offs, bias, *packing, False), y)
    torch.testing.assert_close(composed(grad, weight.rows(), offs, None, *packing, True), dx)


def test_composition_names_a_missing_scale():
    x, weight, offs, bias, _ = problem("mxfp4", (2, 9), torch.bfloat16)
    with pytest.raises(ValueError, match="mxfp4 needs scale: data uint8"):
        composed(x, weight.rows(), offs, bias, None, None, FORMATS["mxfp4"].number, False, False)


def test_autocast_and_torch_func():
    x, weight, _, bias, grad = problem("mxfp4", (9,), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = frozen_gemm(x, weight, None, bias)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, frozen_gemm(x.bfloat16(), weight, None, bias.bfloat16()))
    found = torch.func.grad(lambda x: (frozen_gemm(x, weight, None, bias) * grad).sum())(x)
    assert torch.equal(found, results(frozen_gemm, x, weight, None, bias, grad)[1])
    with pytest.raises(NotImplementedError, match="frozen_gemm has no forward-mode derivative"):
        torch.func.jvp(lambda x: frozen_gemm(x, weight), (x,), (x,))
    found = torch.func.grad(
        lambda x: torch.func.grad(lambda x: frozen_gemm(x, weight).square().sum())(x).sum()
    )(x)
    expected = frozen_gemm_ref(torch.ones_like(x), weight).mm(weight.dequantize()[0]) * 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_results_do_not_depend_on_threads_nor_on_the_batch(name):
    given = problem(name, (80,), torch.float32, out=300)
    x, weight, _, bias, _ = given
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results(frozen_gemm, *given)
        torch.set_num_threads(3)
        for got, wanted in zip(results(frozen_gemm, *given), expected, strict=True):
            assert torch.equal(got, wanted)
        with ops.batch_invariant():
            whole = frozen_gemm(x, weight, None, bias)
            for rows in (1, 33):
                assert torch.equal(frozen_gemm(x[:rows], weight, None, bias), whole[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.zeros(5, 128, dtype=torch.float64)}, r"weight must have shape \[E, N, D\] with size 128"),
        ({0: torch.zeros(5, 256, dtype=torch.int64)}, "x must be float64, float32, bfloat16 or float16"),
        ({1: torch.zeros(2, 37, 16)}, "weight must be uint8 when it is packed"),
        ({2: None}, "offs must be given: weight is of 2 experts"),
        ({2: torch.tensor([5, 3], dtype=torch.int32)}, r"offs must not decrease .* offs\[1\] is 3 after 5"),
        ({2: torch.tensor([2, 6], dtype=torch.int32)}, "offs must not exceed the number of rows 5"),
        ({3: torch.zeros(2, 36, dtype=torch.float64)}, r"bias must have shape \[E, N\] with size 37"),
        ({3: torch.zeros(2, 37)}, "bias must have the dtype of x"),
        ({4: None}, "weight_scale must be given"),
        ({4: None, 6: 0}, "weight_format must be of a packed format, not 0: grouped_gemm"),
        ({6: 60}, r"weight_format must be in \[0, 14\), a number in frozen.FORMATS, but got 60"),
    ],
)
def test_operator_refuses(changes, message):
    x, weight, offs, bias, _ = problem("mxfp4", (2, 3), torch.float64)
    arguments = [x, weight.rows(), offs, bias, *weight.packing(), False]
    for place, value in changes.items():
        arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fmoe_ext.frozen_gemm(*arguments)


def test_transposed_product_refuses():
    _, weight, offs, bias, grad = problem("mxfp4", (2, 3), torch.float64)
    arguments = weight.rows(), offs, None, *weight.packing(), True
    with pytest.raises(RuntimeError, match=r"x must have shape \[R, N\] with size 37"):
        torch.ops.fmoe_ext.frozen_gemm(grad[:, 1:], *arguments)
    with pytest.raises(RuntimeError, match="offs must not exceed the number of rows 4"):
        torch.ops.fmoe_ext.frozen_gemm(grad[1:], *arguments)
    with pytest.raises(RuntimeError, match="bias must be None with transposed=True"):
        torch.ops.fmoe_ext.frozen_gemm(grad, weight.rows(), offs, bias, *weight.packing(), True)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_inference_mode_train(format):
    """A backward may keep of a weight what a product in inference_mode has kept."""
    weight = packed(format, 2, 8, 256)
    x = torch.randn(3, weight.shape[2])
    offs = torch.tensor([1, 3], dtype=torch.int32)
    with torch.inference_mode():
        inferred = frozen_gemm(x, weight, offs)
    leaf = x.clone().requires_grad_()
    out = frozen_gemm(leaf, weight, offs)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), inferred.clone(), rtol=1e-4, atol=1e-4)
    expected = torch.stack([weight.dequantize()[e].sum(0) for e in (0, 1, 1)])
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-4)
