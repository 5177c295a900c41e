"""Products with MXFP4 weights of cuda/ against decoded weights in float64, on CPU tensors through the emulator."""

import pytest
import torch
from gemm_cases import check, chosen

from fmoe_ext import frozen, ops
from fmoe_ext.adapters import Lora
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.frozen_gemm import composed as frozen_gemm
from fmoe_ext.frozen.frozen_gemm import composed_backward as frozen_gemm_backward
from fmoe_ext.frozen.frozen_mlp import composed as frozen_mlp
from fmoe_ext.frozen.frozen_mlp import composed_backward as frozen_mlp_backward
from fmoe_ext.frozen.quantized import gates_first
from fmoe_ext.ops.activations import activation_number
from tests.ops import frozen_arguments
from tests.ops.test_quantized import packed

# Tiles of the kernels, and the capability of the device that the emulator claims to be.
TILES = {"128x128": 80, "128x256": 90}


def names(tile):
    return [f"{product}_by_mxfp4.{tile}" for product in ("rows", "grad")]


@pytest.fixture(autouse=True, params=TILES)
def tile(emulated, request):
    emulated.set_device(TILES[request.param], 3)
    emulated._set_gpu_kernels(names(request.param))
    yield request.param
    emulated._set_gpu_kernels(emulated._gpu_kernels())
    emulated.set_device(80, 3)


def tensors(weight):
    return weight.rows(), weight.scale


def product(emulated, rows, weight, offs, bias=None, transposed=False):
    return emulated._mxfp4_gemm(rows, *tensors(weight), offs, bias, transposed, weight.interleaved)


def check_products(emulated, tile, weight, counts, padding=3):
    """Both products, by their kernels, twice the same bits; a bias and none."""
    E, out, width = weight.shape
    R = sum(counts) + padding
    generator = torch.Generator().manual_seed(1)
    x, dy, bias = (torch.randn(s, generator=generator).bfloat16() for s in ((R, width), (R, out), (E, out)))
    offs = torch.tensor(counts).cumsum(0).int()
    decoded = {dtype: weight.dequantize(dtype) for dtype in (torch.float64, torch.bfloat16)}
    for name, rows, shift, transposed in (
        ("y", x, bias, False),
        ("y without a bias", x, None, False),
        ("dx", dy, None, True),
    ):
        arguments = (emulated, rows, weight, offs, shift, transposed)
        y = product(*arguments)
        truth, plain = (
            ops.grouped_gemm_ref(
                rows.to(dtype), w, offs, None if shift is None else shift.to(dtype), transposed
            )
            for dtype, w in decoded.items()
        )
        check(y, truth, plain, name)
        assert torch.equal(product(*arguments), y), name
        assert chosen(emulated, product, *arguments) == [names(tile)[transposed]]


SIZES = [(8, 32), (136, 96), (264, 160), (72, 448)]  # tails of n and of k, several steps and tiles


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 130, 1], [70], [129, 64, 0, 1]], ids=str)
def test_products(emulated, tile, counts, sizes):
    check_products(emulated, tile, packed("mxfp4", len(counts), *sizes), counts)


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 140, 1]], ids=str)
def test_interleaved_rows(emulated, tile, counts):
    weight = packed("mxfp4", len(counts), 272, 96)
    weight = Quantized(weight.format, weight.data, weight.scale, interleaved=True)
    check_products(emulated, tile, weight, counts)


@pytest.mark.parametrize("transposed", [False, True])
def test_no_rows_or_padding_alone(emulated, transposed):
    weight = packed("mxfp4", 2, 40, 64)
    offs, width = torch.zeros(2, dtype=torch.int32), 40 if transposed else 64
    assert product(emulated, torch.zeros(0, width).bfloat16(), weight, offs, None, transposed).dim() == 1
    y = product(emulated, torch.ones(5, width).bfloat16(), weight, offs, None, transposed)
    assert y.shape == (5, 104 - width) and not y.any()


def test_every_code_of_every_scale(emulated):
    """Bit by bit: subnormal, infinite and not a number where decoding in float32 says so."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes | codes << 4)[None, :, None, None, None].expand(1, 16, 256, 1, 16).reshape(1, 4096, 1, 16)
    scale = torch.arange(256).to(torch.uint8).repeat(16).view(1, 4096, 1)
    weight = Quantized("mxfp4", data.contiguous(), scale)
    decoded = weight.dequantize(torch.bfloat16)[0]
    assert torch.equal(decoded.float().nan_to_num(7), weight.dequantize()[0].nan_to_num(7))  # exact
    offs = torch.tensor([1], dtype=torch.int32)
    y = product(emulated, torch.eye(1, 32).bfloat16(), weight, offs)
    expected = decoded[:, 0].clone()
    expected[decoded.isinf()[:, 0]] = torch.nan  # infinity times zero
    assert torch.equal(y[0].isnan(), expected.isnan())
    assert torch.equal(y[0].nan_to_num(7), expected.nan_to_num(7))
    one = torch.zeros(1, 4096).bfloat16()
    for row in (0, 255, 256, 8 * 256, 9 * 256 + 254, 15 * 256 + 253):
        one.zero_()[0, row] = 1
        finite = Quantized("mxfp4", data, torch.where(scale > 252, 127, scale).to(torch.uint8))
        dx = product(emulated, one, finite, offs, None, True)
        assert torch.equal(dx[0], finite.dequantize(torch.bfloat16)[0, row]), row


def test_nan_scale_stays_in_its_expert_row_and_column(emulated):
    weight = packed("mxfp4", 3, 136, 96)
    weight.scale[1, 70, 1] = 255
    x, dy = (torch.randn(9, n, generator=torch.Generator().manual_seed(2)).bfloat16() for n in (96, 136))
    offs = torch.tensor([3, 6, 9], dtype=torch.int32)
    y = product(emulated, x, weight, offs)
    expected = torch.zeros(9, 136, dtype=torch.bool)
    expected[3:6, 70] = True
    assert torch.equal(y.isnan(), expected)
    dx = product(emulated, dy, weight, offs, None, True)
    expected = torch.zeros(9, 96, dtype=torch.bool)
    expected[3:6, 32:64] = True
    assert torch.equal(dx.isnan(), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_products_read_rows_of_their_expert_only(emulated, transposed):
    """Rows of NaN of the next expert, in x and in the weight, do not reach a result."""
    weight = packed("mxfp4", 2, 40, 32)
    weight.scale[1] = 255
    x = torch.randn(7, 40 if transposed else 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[4:] = torch.nan
    y = product(emulated, x, weight, torch.tensor([4, 7], dtype=torch.int32), None, transposed)
    assert y[:4].isfinite().all() and y[4:].isnan().all()


def test_result_does_not_depend_on_the_batch(emulated):
    weight = packed("mxfp4", 1, 72, 160)
    x = torch.randn(150, 160, generator=torch.Generator().manual_seed(4)).bfloat16()

    def times(rows):
        return product(emulated, rows, weight, torch.tensor([len(rows)], dtype=torch.int32))

    whole = times(x)
    for first, size in ((0, 1), (7, 5), (50, 64), (21, 129)):
        assert torch.equal(times(x[first : first + size]), whole[first : first + size])


def test_product_without_a_kernel_is_empty(emulated, tile):
    """An empty tensor says so: other dtypes and devices, kernels that are off, data between 16 bytes."""
    weight, offs = packed("mxfp4", 1, 64, 64), torch.tensor([2], dtype=torch.int32)
    x = torch.zeros(2, 64).bfloat16()
    assert product(emulated, x, weight, offs).shape == (2, 64)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert product(emulated, x.to(dtype), weight, offs).shape == (0,)
    shifted = torch.empty(64 * 32 + 8, dtype=torch.uint8)[8:].view(1, 64, 2, 16).copy_(weight.data)
    assert product(emulated, x, Quantized("mxfp4", shifted, weight.scale), offs).shape == (0,)
    emulated.set_device(75, 3)
    assert product(emulated, x, weight, offs).shape == (0,)
    emulated.set_device(TILES[tile], 3)
    emulated._set_gpu_kernels([])
    assert product(emulated, x, weight, offs).shape == (0,)


def test_rejects_with_the_values(emulated):
    weight, offs = packed("mxfp4", 2, 64, 64), torch.tensor([1, 2], dtype=torch.int32)
    data, scale = tensors(weight)
    x = torch.zeros(2, 64).bfloat16()

    def refused(text, x=x, data=data, scale=scale, offs=offs, bias=None, transposed=False, interleaved=False):
        with pytest.raises(RuntimeError, match=text):
            emulated._mxfp4_gemm(x, data, scale, offs, bias, transposed, interleaved)

    refused(r"size 64 in dimension 1, but got shape \[2, 32\]", x=x[:, :32])
    refused(
        r"data_scale must have shape \[2, 64, 2\] for data \[2, 64, 32\], but got shape \[2, 64, 1\]",
        scale=scale[:, :, :1],
    )
    refused("data_scale must have a dtype of format 1, but got Float", scale=scale.float())
    refused(r"size 2 in dimension 0, but got shape \[1\]", offs=offs[:1])
    refused("bias", bias=torch.zeros(2, 64))
    refused(
        r"an even number of rows when they are interleaved, but got shape \[2, 63, 32\]",
        data=data[:, :63],
        scale=scale[:, :63],
        interleaved=True,
    )


@pytest.fixture
def by_the_operator(emulated):
    library = torch.library.Library("fmoe_ext", "IMPL")
    library.impl("_mxfp4_gemm", emulated._mxfp4_gemm.default, "CPU")
    yield
    del library  # its registrations live as long as it does


@pytest.mark.parametrize("lora", [False, True])
def test_frozen_mlp_by_packed_weights(emulated, tile, by_the_operator, lora):
    """frozen_mlp as on CUDA, GPT-OSS's form: all four products by the kernels, adapters beside them."""
    E, D, H, T, K, rank = 3, 64, 96, 24, 2, 4
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    w1, w2 = packed("mxfp4", E, 2 * H, D), packed("mxfp4", E, D, H, seed=1)
    w1 = Quantized("mxfp4", w1.data, w1.scale, interleaved=True)
    routing = ops.sort_tokens_ref(torch.randint(-1, E, (T, K), generator=generator), E)
    index = (routing.row_idx, routing.inverse, routing.offs)
    x, b1, b2, weights = random(T, D), random(E, 2 * H), random(E, D), random(T, K).abs()
    loras = [None, None]
    if lora:
        loras = [
            Lora(random(E, rank, D), random(E, 2 * H, rank), 0.5),
            Lora(random(E, rank, H), random(E, D, rank)),
        ]
    grad = random(T, D)

    def results_in_float64():
        leaf = x.double().requires_grad_()
        learned, cast = [leaf], [None, None]
        for i, adapter in enumerate(loras):
            if adapter:
                parts = [t.double().requires_grad_() for t in adapter[:2]]
                learned, cast[i] = [*learned, *parts], Lora(*parts, adapter.scale)
        arguments = (w1, b1.double(), w2, b2.double(), weights.double(), "clamped_swiglu", True, *cast)
        y = frozen.frozen_mlp_ref(leaf, *index, *arguments)
        found = [y.detach(), *torch.autograd.grad(y, learned, grad.double())]
        if lora:
            found[3] = gates_first(found[3])
        return found

    b1_, lora1 = gates_first(b1), loras[0] and loras[0]._replace(b=gates_first(loras[0].b))
    given = {"x": x, **routing._asdict(), "b1": b1_, "b2": b2, "topk_weights": weights}
    given |= {**frozen_arguments.packing_of(w1, w2), "activation": activation_number("clamped_swiglu")}
    for i, adapter in ((1, lora1), (2, loras[1])):
        if adapter:
            given |= {f"lora_a{i}": adapter.a, f"lora_b{i}": adapter.b, f"scale{i}": adapter.scale}
    needs = [True, lora, lora, lora, lora, True]

    @torch.no_grad()
    def results():
        forward = frozen_arguments.forward(**given)
        y, *kept = frozen_mlp(*forward)
        backward = frozen_arguments.backward(forward, grad, kept, needs)
        return [y, *frozen_mlp_backward(*backward)[: 5 if lora else 1]]

    assert chosen(emulated, results) == names(tile)
    ours = results()
    emulated._set_gpu_kernels([])
    assert chosen(emulated, results) == []
    for name, one, true, decoded in zip(
        ("y", "dx", "da1", "db1", "da2", "db2"), ours, results_in_float64(), results(), strict=False
    ):
        check(one, true, decoded, name)


@pytest.mark.parametrize("rows", [1, 37, 130])
@pytest.mark.parametrize("interleaved", [False, True])
def test_frozen_gemm_by_a_packed_weight(emulated, tile, by_the_operator, rows, interleaved):
    """frozen_gemm as on CUDA, of a linear layer: one group with all rows, both products by the kernels."""
    out, width = 136, 96
    weight = packed("mxfp4", 1, out, width)
    weight = Quantized("mxfp4", weight.data, weight.scale, interleaved=interleaved)
    generator = torch.Generator().manual_seed(6)
    x, bias, grad = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, width), (1, out), (rows, out))
    )
    packing = weight.packing()
    shift = gates_first(bias) if interleaved else bias

    def results():
        y = frozen_gemm(x, weight.rows(), None, shift, *packing)
        return y, frozen_gemm_backward(grad, weight.rows(), None, *packing)

    def expected(dtype):
        leaf = x.to(dtype).requires_grad_()
        y = frozen.frozen_gemm_ref(leaf, weight, None, bias.to(dtype))
        return y.detach(), *torch.autograd.grad(y, leaf, grad.to(dtype))

    assert chosen(emulated, results) == names(tile)
    for name, one, true, plain in zip(
        ("y", "dx"), results(), expected(torch.float64), expected(torch.bfloat16), strict=True
    ):
        check(one, true, plain, name)


def test_frozen_gemm_decodes_where_no_kernel_fits(emulated, by_the_operator):
    """Other dtypes, kernels that are off, no rows, other formats: the result of the CPU's operator."""

    def check_decoded(x, weight):
        packing = weight.packing()
        grad = torch.ones(len(x), weight.shape[1], dtype=x.dtype)

        def results():
            y = frozen_gemm(x, weight.rows(), None, None, *packing)
            return y, frozen_gemm_backward(grad, weight.rows(), None, *packing)

        assert chosen(emulated, results) == []
        leaf = x.clone().requires_grad_()
        y = frozen.frozen_gemm(leaf, weight)
        for one, other in zip(results(), (y.detach(), *torch.autograd.grad(y, leaf, grad)), strict=True):
            torch.testing.assert_close(one, other)

    # The CPU multiplies fewer rows as codes.
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(7))
    for dtype in (torch.float64, torch.float32, torch.float16):
        check_decoded(x.to(dtype), packed("mxfp4", 1, 24, 64))
    check_decoded(x[:0].bfloat16(), packed("mxfp4", 1, 24, 64))
    check_decoded(x.bfloat16(), packed("nf4", 1, 24, 64))
    emulated._set_gpu_kernels([])
    check_decoded(x.bfloat16(), packed("mxfp4", 1, 24, 64))
