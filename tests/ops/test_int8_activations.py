"""Products of packed weights with rows that are rounded to 8 bits, against the same integers in plain PyTorch."""

from dataclasses import replace

import pytest
import torch

from fmoe_ext import frozen, ops
from tests.ops import instruction_sets

pytestmark = pytest.mark.cpu("products in integers exist there alone")

BLOCKS = {"q8_0": 32, "q4_k": 256}


def rows_between_codes(rows, width, block, dtype):
    """(x, x rounded to 8 bits): each block has 127 steps of a power of two, and x is well off from two of them."""
    codes = torch.randint(-127, 128, (rows, width // block, block)).double()
    codes[..., 3] = 127
    step = 2.0 ** torch.randint(-9, -3, (rows, width // block, 1)).double()
    off = torch.rand(codes.shape).double() * 0.8 - 0.4 if dtype == torch.float32 else torch.zeros(codes.shape)
    off[..., 3] = 0
    off[codes.abs() == 127] = 0
    return ((codes + off) * step).flatten(1).to(dtype), (codes * step).flatten(1)


def packed(format, E, out, width, seed=0):
    weight = torch.randn(E, out, width, generator=torch.Generator().manual_seed(seed))
    return frozen.quantize(weight, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", BLOCKS)
def test_frozen_gemm_in_int8_equals_products_of_rounded_rows(isa, format, dtype):
    rows = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 15, 16]
    offs = torch.tensor(rows).cumsum(0).int()
    weight = packed(format, len(rows), 37, 768)
    x, rounded = rows_between_codes(int(offs[-1]), 768, BLOCKS[format], dtype)
    with torch.no_grad():
        ours = frozen.frozen_gemm(x, weight.in_int8, offs)
    expert = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    expected = (rounded[:, None] @ weight.dequantize().double()[expert].mT)[:, 0]
    tolerance = torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(
        ours.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
    )


@pytest.mark.parametrize("format", BLOCKS)
def test_frozen_gemm_in_int8_has_the_stated_error(isa, format):
    weight, x = packed(format, 1, 64, 512), torch.randn(6, 512)
    with torch.no_grad():
        ours = frozen.frozen_gemm(x, weight.in_int8)
    exact = x.double() @ weight.dequantize()[0].double().T
    largest = (
        x.double().abs().unflatten(1, (-1, BLOCKS[format])).amax(-1).repeat_interleave(BLOCKS[format], 1)
    )
    bound = largest / 254 @ weight.dequantize()[0].double().abs().T
    error = (ours - exact).abs()
    assert (error <= bound * 1.001).all()
    assert error.max() > 0.01 * bound.mean()  # it does round
    assert error.norm() / exact.norm() < 0.015


@pytest.mark.parametrize("format", BLOCKS)
def test_frozen_mlp_in_int8_is_near_the_exact_one(isa, format):
    E, D, H, T = 4, 256, 256, 9
    w1, w2 = packed(format, E, 2 * H, D), packed(format, E, D, H, seed=1)
    x, topk_idx = torch.randn(T, D) * 0.1, torch.randint(0, E, (T, 2))
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, E)
    weights = torch.rand(T, 2)
    given = (x, row_idx, inverse, offs), (None,), (None, weights, "swiglu")
    with torch.no_grad():
        exact = frozen.frozen_mlp(*given[0], w1, *given[1], w2, *given[2])
        ours = frozen.frozen_mlp(*given[0], w1.in_int8, *given[1], w2.in_int8, *given[2])
    assert 1e-5 < (ours - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("format", BLOCKS)
def test_int8_row_has_the_same_bits_in_every_batch_and_thread_count(isa, format):
    weight, x = packed(format, 1, 200, 512).in_int8, torch.randn(31, 512)
    threads = torch.get_num_threads()
    with torch.no_grad():
        expected = torch.cat([frozen.frozen_gemm(row, weight) for row in x.split(1)])
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(frozen.frozen_gemm(x, weight), expected)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("format", BLOCKS)
def test_int8_has_the_same_bits_with_vnni(format):
    weight, x = packed(format, 1, 50, 768).in_int8, torch.randn(11, 768)
    found = []
    with instruction_sets.restored(), torch.no_grad():
        for isa in ("avx512", "avx512_vnni"):
            instruction_sets.use(isa)
            found.append(frozen.frozen_gemm(x, weight))
    assert torch.equal(*found)


@pytest.mark.parametrize("width", [32, 96, 160])
def test_int8_of_an_odd_number_of_blocks(isa, width):
    weight = packed("q8_0", 1, 37, width)
    x, rounded = rows_between_codes(9, width, 32, torch.float32)
    with torch.no_grad():
        ours = frozen.frozen_gemm(x, weight.in_int8)
    torch.testing.assert_close(
        ours.double(), rounded @ weight.dequantize()[0].double().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("format", BLOCKS)
def test_int8_of_extreme_values(isa, format):
    weight, x = packed(format, 1, 40, 512), torch.randn(7, 512)
    x[1], x[2, :300] = 0, 1e-38
    x[3, 5], x[4, 400], x[5, 7] = float("nan"), float("inf"), 3e38
    with torch.no_grad():
        ours = frozen.frozen_gemm(x, weight.in_int8)
    assert torch.equal(ours[1], torch.zeros(40))
    assert ours[[0, 2]].isfinite().all() and not ours[[3, 4]].isfinite().any()
    torch.testing.assert_close(ours[2], frozen.frozen_gemm(x[2:3], weight)[0], rtol=0.1, atol=1.0)


def test_int8_is_left_out_where_gradients_are_recorded_and_in_float64():
    weight, x = packed("q4_k", 1, 16, 256), torch.randn(3, 256)
    exact = frozen.frozen_gemm(x, weight)
    assert torch.equal(frozen.frozen_gemm(x, weight.in_int8), exact)
    with torch.no_grad():
        assert not torch.equal(frozen.frozen_gemm(x, weight.in_int8), exact)
        double = frozen.frozen_gemm(x.double(), weight)
        assert torch.equal(frozen.frozen_gemm(x.double(), weight.in_int8), double)


def test_int8_of_another_format_is_refused():
    weight = frozen.quantize(torch.randn(1, 8, 64), "mxfp4")
    assert weight.in_int8 is weight
    with pytest.raises(ValueError, match="int8_activations is for the formats q8_0 and q4_k, but got mxfp4"):
        replace(weight, int8_activations=True)
    with pytest.raises(
        RuntimeError, match="weight_format must be q8_0 or q4_k for integer products, but got 1"
    ):
        torch.ops.fmoe_ext.frozen_gemm(
            torch.randn(1, 64), weight.rows(), None, None, weight.scale, None, 65, False, False
        )
