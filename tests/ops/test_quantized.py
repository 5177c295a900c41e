"""Packed weights: decoding against the formats' reference libraries, and frozen_mlp with them."""

import itertools

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from fmoe_ext import frozen, ops
from fmoe_ext.adapters import Lora
from fmoe_ext.frozen import FORMATS, Quantized, frozen_mlp, frozen_mlp_ref
from fmoe_ext.frozen.formats import GGUF
from fmoe_ext.frozen.frozen_mlp import composed, composed_backward
from fmoe_ext.testing import assert_close
from tests.ops import frozen_arguments
from tests.ops.test_expert_mlp import Problem
from tests.sweeps import OPCHECKED, rest_is_long


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# columns and bytes of a block, what its scales are divided by, and where they are
BLOCKS = {
    "q8_0": (32, 34, 100, 0),
    "q4_0": (32, 18, 8, 0),
    "q4_k": (256, 144, 500, 0, 2),
    "q5_k": (256, 176, 1000, 0, 2),
    "q6_k": (256, 210, 500, 208),
    "iq4_nl": (32, 18, 100, 0),
    "iq4_xs": (256, 136, 2000, 0),
}


def packed(name, E, out, width, seed=0):
    """A weight of random codes whose values are about 1 / sqrt(width)."""
    generator = torch.Generator().manual_seed(seed)
    size = width**-0.5

    def scales(*shape):
        return (torch.rand(shape, generator=generator) + 0.5) * size

    if name == "mxfp4":
        exponent = torch.randint(120, 123, (E, out, width // 32), dtype=torch.uint8, generator=generator)
        return Quantized(name, random_bytes(E, out, width // 32, 16, seed=seed), exponent)
    if name == "mxfp8":
        data = torch.randn(E, out, width, generator=generator).to(torch.float8_e4m3fn)
        exponent = torch.randint(120, 124, (E, out, width // 32), dtype=torch.uint8, generator=generator)
        return Quantized(name, data, exponent)
    if name == "nvfp4":
        scale = (torch.rand(E, out, width // 16, generator=generator) + 0.5).to(torch.float8_e4m3fn)
        factors = torch.stack((scales(E, out), 4 + torch.rand(E, out, generator=generator)), -1)
        return Quantized(name, random_bytes(E, out, width // 2, seed=seed), scale, factors)
    if name == "fp8_block":
        data = torch.randn(E, out, width, generator=generator).to(torch.float8_e4m3fn)
        return Quantized(name, data, scales(E, -(-out // 128), -(-width // 128)))
    if name == "int4":
        words = random_bytes(E, out, width // 2, seed=seed).view(torch.int32)
        return Quantized(name, words, (scales(E, out, width // 32) / 8).bfloat16())
    if name == "nf4":
        return Quantized(name, random_bytes(E, out, width // 2, seed=seed), scales(E, out, width // 64))
    block, size_of, least, *places = BLOCKS[name]
    blocks = random_bytes(E, out, width // block, size_of, seed=seed)
    for place in places:
        small = (scales(E, out, width // block, 1) / least).half()
        blocks[..., place : place + 2] = small.view(torch.uint8)
    return Quantized(name, blocks.flatten(2))


@pytest.mark.parametrize("name", GGUF)
def test_gguf_decodes_as_the_gguf_package(name):
    weight = packed(name, 2, 3, 512)
    expected = dequantize(weight.data.numpy(), GGMLQuantizationType[name.upper()])
    assert np.array_equal(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_frozen_mlp_takes_packed_weights(name, dtype):
    E, D, H, T = 3, 256, 256, 40
    problem = Problem(T, 2, E, D, H, dtype, "swiglu", bias=True)
    w1, w2 = packed(name, E, 2 * H, D), packed(name, E, D, H, seed=1)
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(E, 4, D, generator=generator) / 16, torch.randn(E, 2 * H, 4, generator=generator)
    tensors = {**problem.tensors, "a": a.to(dtype).requires_grad_(), "b": b.to(dtype).requires_grad_()}
    learned = ("x", "topk_weights", "a", "b")

    def results(function, dtype=None, decode=False):
        t = {n: v if v is None else v.detach().to(dtype or v.dtype) for n, v in tensors.items()}
        for n in learned:
            t[n].requires_grad_()
        first, second = (w.dequantize(t["x"].dtype) if decode else w for w in (w1, w2))
        y = function(
            t["x"], problem.row_idx, problem.inverse, problem.offs, first, t["b1"], second, t["b2"],
            t["topk_weights"], "swiglu", True, Lora(t["a"], t["b"], 0.5),
        )  # fmt: skip
        return y.detach(), *torch.autograd.grad(y, [t[n] for n in learned], problem.grad.to(y.dtype))

    truth, plain = results(frozen_mlp_ref, torch.float64), results(frozen_mlp_ref, decode=True)
    for got, expected, reference in zip(results(frozen_mlp), truth, plain, strict=True):
        assert_close(got, expected, reference)


def test_interleaved_rows_have_their_bias_and_adapter_in_their_order():
    E, D, H = 2, 64, 32
    problem = Problem(9, 2, E, D, H, torch.float64, "swiglu", bias=True)
    t = {n: v if v is None else v.detach() for n, v in problem.tensors.items()}
    plain = packed("mxfp4", E, 2 * H, D)
    order = torch.arange(2 * H).view(2, H).T.flatten()  # gate 0, up 0, gate 1, ...
    in_turn = Quantized("mxfp4", plain.data[:, order], plain.scale[:, order], interleaved=True)
    assert torch.equal(in_turn.dequantize(), plain.dequantize())
    a, b = torch.randn(E, 3, D, dtype=torch.float64), torch.randn(E, 2 * H, 3, dtype=torch.float64)

    def call(w1, order):
        return frozen.frozen_mlp(
            *(
                t["x"],
                problem.row_idx,
                problem.inverse,
                problem.offs,
                w1,
                t["b1"][:, order],
                t["w2"],
                t["b2"],
            ),
            *(t["topk_weights"], "swiglu", True, Lora(a, b[:, order])),
        )

    assert torch.equal(call(in_turn, order), call(plain, slice(None)))


def pre_activation(weight, x):
    """x times the transposed weight of expert 1 of 2, by the operator."""
    sorted_tokens = ops.sort_tokens(torch.ones(len(x), 1, dtype=torch.long), 2)
    out = weight.shape[1]
    w2 = torch.zeros(2, x.shape[1], out, dtype=x.dtype)
    scale, zero, number, _ = weight.packing()
    arguments = frozen_arguments.forward(
        x=x,
        row_idx=sorted_tokens.row_idx,
        inverse=sorted_tokens.inverse,
        offs=sorted_tokens.offs,
        w1=weight.rows(),
        w2=w2,
        activation=2,
        w1_scale=scale,
        w1_zero=zero,
        w1_format=number,
    )
    _, h, _, _ = torch.ops.fmoe_ext.frozen_mlp(*arguments)
    return h


def gradient_by_w2(weight, grad):
    """grad times the weight of expert 1 of 2, by the operator: w1 is an identity and relu's slope 1."""
    _, out, width = weight.shape
    sorted_tokens = ops.sort_tokens(torch.ones(len(grad), 1, dtype=torch.long), 2)
    w1 = torch.eye(width, out, dtype=grad.dtype).expand(2, width, out).contiguous()
    x = torch.ones(len(grad), out, dtype=grad.dtype, requires_grad=True)
    y = frozen_mlp(
        x, sorted_tokens.row_idx, sorted_tokens.inverse, sorted_tokens.offs, w1, None, weight, None,
        None, "relu",
    )  # fmt: skip
    return torch.autograd.grad(y, x, grad)[0][:, :width]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_decode_to_the_bits_of_dequantize(isa, name, dtype):
    width, out = 256, 259
    weight = packed(name, 2, out, width, seed=3)
    expected = weight.dequantize(dtype)[1]
    ones = torch.eye(width, dtype=dtype)
    for rows in (width, 20, 14, 8, 5, 4, 3, 2, 1):  # panels; decoded into a buffer; in registers
        found = pre_activation(weight, ones[-rows:])
        # codes of 16 bits, which may round otherwise
        if (name, dtype) == ("nf4", torch.bfloat16) and rows < 20:
            torch.testing.assert_close(found, expected.T[-rows:], rtol=2**-7, atol=0)
        else:
            assert torch.equal(found, expected.T[-rows:]), rows
    for rows in (45, 7):
        assert torch.equal(gradient_by_w2(weight, torch.eye(out, dtype=dtype)[-rows:]), expected[-rows:]), (
            rows
        )


def frozen_call(name, dtype=torch.float64, T=9, **changes):
    E, D, H = 2, 256, 256
    problem = Problem(T, 2, E, D, H, dtype, "swiglu", bias=True)
    t = {n: v if v is None else v.detach() for n, v in problem.tensors.items()}
    w1, w2 = packed(name, E, 2 * H, D), packed(name, E, D, H, seed=1)
    given = {"row_idx": problem.row_idx, "inverse": problem.inverse, "offs": problem.offs, "activation": 4}
    given |= {**t, **frozen_arguments.packing_of(w1, w2)}
    return frozen_arguments.forward(**{**given, **changes}), problem, (w1, w2)


def backward_arguments(arguments, problem, kept):
    needs = [True, False, False, False, False, True]
    return frozen_arguments.backward(arguments, problem.grad, kept, needs)


@pytest.mark.parametrize("name", rest_is_long(FORMATS, OPCHECKED))
@torch.no_grad()
def test_opcheck(name):
    arguments, problem, _ = frozen_call(name)
    torch.library.opcheck(torch.ops.fmoe_ext.frozen_mlp, arguments)
    kept = torch.ops.fmoe_ext.frozen_mlp(*arguments)[1:]
    torch.library.opcheck(
        torch.ops.fmoe_ext.frozen_mlp_backward, backward_arguments(arguments, problem, kept)
    )


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_composition_for_cuda_equals_the_kernel(name):
    arguments, problem, _ = frozen_call(name)
    kernel, by_products = torch.ops.fmoe_ext.frozen_mlp(*arguments), composed(*arguments)
    for got, expected in zip(by_products, kernel, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    backward = backward_arguments(arguments, problem, kernel[1:])
    expected = torch.ops.fmoe_ext.frozen_mlp_backward(*backward)
    for got, wanted in zip(composed_backward(*backward), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def public(arguments, weights):
    a = arguments
    index = a.row_idx, a.inverse, a.offs
    return lambda x: frozen_mlp(x, *index, weights[0], a.b1, weights[1], a.b2, None, "swiglu"), a.x


def test_autocast_and_torch_func():
    arguments, _, weights = frozen_call("mxfp4", torch.float32)
    function, x = public(arguments, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = function(x)
    assert y.dtype == torch.bfloat16
    assert (y.float() - function(x)).norm() <= 0.02 * function(x).norm()
    gradient = torch.func.grad(lambda x: function(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_results_do_not_depend_on_threads_nor_on_the_batch(name):
    arguments, _, weights = frozen_call(name, torch.float32, T=80)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = torch.ops.fmoe_ext.frozen_mlp(*arguments)[0]
        torch.set_num_threads(3)
        assert torch.equal(torch.ops.fmoe_ext.frozen_mlp(*arguments)[0], expected)
        with ops.batch_invariant():
            all_rows = rows_of_tokens(arguments, weights, 80)
            assert torch.equal(rows_of_tokens(arguments, weights, 1), all_rows[:1])
            assert torch.equal(rows_of_tokens(arguments, weights, 33), all_rows[:33])
    finally:
        torch.set_num_threads(before)


def rows_of_tokens(arguments, weights, T):
    """The result for the first T tokens, which all choose both experts."""
    s = ops.sort_tokens(torch.tensor([[0, 1]]).expand(T, 2).contiguous(), 2)
    index = (s.row_idx, s.inverse, s.offs)
    biases = arguments.b1, arguments.b2
    return frozen_mlp(arguments.x[:T], *index, weights[0], biases[0], weights[1], biases[1], None, "swiglu")


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_nan_scale_reaches_its_block_only(name):
    weight = packed(name, 2, 3, 64)
    weight.scale[1, 2, 1] = 255
    decoded = weight.dequantize()
    assert decoded[1, 2, 32:].isnan().all() and decoded.isnan().sum() == 32
    h = pre_activation(Quantized(name, weight.data, weight.scale), torch.eye(64))
    assert h[32:, 2].isnan().all() and not h[:, :2].isnan().any()


WIDTHS = [1, 63, 64, 65, 80, 96, 112, 127, 128, 129, 191, 192, 193, 208, 224, 257]
WIDTHS_OF_PARTS = list(itertools.product((1, 2, 3), WIDTHS))
FEW_WIDTHS_OF_PARTS = [*zip(itertools.cycle((1, 2, 3)), WIDTHS, strict=False), (2, 65), (3, 129), (2, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("parts", "rows"), rest_is_long(WIDTHS_OF_PARTS, FEW_WIDTHS_OF_PARTS))
def test_fp8_of_parts_of_any_width_apart_and_joined(isa, dtype, rows, parts):
    generator, width = torch.Generator().manual_seed(2), 160
    data = torch.randn(2, parts, rows, width, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, parts, -(-rows // 128), 2, generator=generator) + 0.5
    apart = [Quantized("fp8_block", data[:, p], scale[:, p]) for p in range(parts)]
    joined = Quantized.joined("fp8_block", data.flatten(1, 2), scale.flatten(1, 2), None, parts)
    expected = torch.cat([part.dequantize(dtype) for part in apart], 1)
    assert torch.equal(joined.dequantize(dtype), expected)
    for count in (width, 9, 3):
        assert torch.equal(
            pre_activation(joined, torch.eye(width, dtype=dtype)[-count:]), expected[1].T[-count:]
        )


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 96, 128])
def test_int4_with_zero_points(isa, group, scale_dtype):
    width, out = 384, 21
    words = random_bytes(2, out, width // 2).view(torch.int32)
    scale = (torch.rand(2, out, width // group, generator=torch.Generator().manual_seed(3)) / 50).to(
        scale_dtype
    )
    zero = random_bytes(2, 3, width // group * 4, seed=4).view(torch.int32)
    weight = Quantized("int4", words, scale, zero)
    expected = weight.dequantize()[1]
    assert (expected != Quantized("int4", words, scale).dequantize()[1]).any()
    for count in (width, 9, 4, 1):
        assert torch.equal(pre_activation(weight, torch.eye(width)[-count:]), expected.T[-count:])


def with_zero_points(out, width, group):
    generator = torch.Generator().manual_seed(6)
    scale = (torch.rand(2, out, width // group, generator=generator) + 0.5) / 8 * width**-0.5
    zero = random_bytes(2, -(-out // 8), width // group * 4, seed=4).view(torch.int32)
    return Quantized("int4", random_bytes(2, out, width // 2).view(torch.int32), scale, zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FORMATS, "int4, zero points of 32", "int4, zero points of 96"])
def test_few_long_rows_err_by_rounding_alone(isa, name, dtype):
    """Rows longer than what a kernel puts in order at once, with an odd number of blocks where the format allows it."""
    out = 37
    if "zero" in name:
        group = int(name.split()[-1])
        weight = with_zero_points(out, 129 * group if group == 32 else 45 * group, group)
    else:
        width = {"nf4": 65 * 64, "fp8_block": 4147}.get(name, 129 * 32)
        if name in BLOCKS and BLOCKS[name][0] == 256:
            width = 17 * 256
        weight = packed(name, 2, out, width, seed=5)
    values = weight.dequantize()[1].double()
    x = torch.randn(14, values.shape[1], generator=torch.Generator().manual_seed(7)).to(dtype)
    expected, size = x.double() @ values.T, x.double().abs() @ values.abs().T
    most = {"avx512_bf16": 14, "amx_bf16": 3} if dtype == torch.bfloat16 else {}
    in_registers = most.get(isa, 4)  # more rows round the weight first
    for rows in filter(lambda rows: rows <= in_registers, (1, 2, 3, 4, 5, 8, 9, 14)):
        off = (pre_activation(weight, x[:rows]).double() - expected[:rows]).abs()
        assert (off <= torch.finfo(dtype).eps / 2 * expected[:rows].abs() + 4e-6 * size[:rows]).all(), rows


BYTES = torch.zeros(2, 4, 32, dtype=torch.uint8)
NVFP4_SCALE = torch.ones(2, 4, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("q3_k", BYTES), 'unknown format "q3_k": known are mxfp4, fp8_block, '),
        (("mxfp4", BYTES.view(2, 4, 2, 16)), "mxfp4 needs scale"),
        (("mxfp4", BYTES), "data of mxfp4 must be uint8 with 4 dimensions"),
        (("mxfp4", BYTES.view(2, 4, 2, 16), BYTES[:, :, :1]), r"scale must have shape \[2, 4, 2\]"),
        (("fp8_block", BYTES, torch.ones(2, 1, 1)), "data of fp8_block must be float8_e4m3fn"),
        (("fp8_block", BYTES.view(torch.float8_e4m3fn), torch.ones(2, 3, 1)), r"scale must have shape"),
        (
            ("fp8_block", BYTES.view(torch.float8_e4m3fn), torch.ones(2, 2, 2, 1)),
            r"scale must have shape \[2, 2, 1, 1\]",
        ),
        (("fp8_block", BYTES.view(torch.float8_e4m3fn), torch.ones(2, 3, 1, 1)), "no 3 equal parts"),
        (
            ("int4", BYTES.view(torch.int32), torch.ones(2, 4, 3)),
            "groups of int4 must be whole multiples of 32",
        ),
        (("q8_0", BYTES), "a row of q8_0 must be whole blocks of 34 bytes, but got 32 bytes"),
        (("q4_k", BYTES[..., :0], BYTES), "q4_k has no scale"),
        (("iq4_xs", BYTES), "a row of iq4_xs must be whole blocks of 136 bytes, but got 32 bytes"),
        (("mxfp8", BYTES.view(torch.float8_e4m3fn), BYTES[..., :2]), r"scale must have shape \[2, 4, 1\]"),
        (("mxfp8", BYTES[..., :8].view(torch.float8_e4m3fn), BYTES[..., :1]), "whole blocks of 32 columns"),
        (("nvfp4", BYTES), "nvfp4 needs scale"),
        (("nvfp4", BYTES, NVFP4_SCALE), "nvfp4 needs zero: data uint8"),
        (
            ("nvfp4", BYTES[..., :8], NVFP4_SCALE, torch.ones(2, 4, 2)),
            "whole blocks of 32 columns, but got 16",
        ),
        (("nvfp4", BYTES, NVFP4_SCALE[..., :2], torch.ones(2, 4, 2)), r"scale must have shape \[2, 4, 4\]"),
        (("nvfp4", BYTES, NVFP4_SCALE, torch.ones(2, 4, 1)), r"zero must have shape \[2, 4, 2\]"),
        (("nf4", BYTES, torch.ones(2, 3, 1)), r"scale must have shape \[2, 4, 1\]"),
        (("nf4", BYTES, torch.ones(3, 4, 1)), "scale must be of 2 experts"),
        (("q8_0", torch.zeros(2, 3, 34, dtype=torch.uint8), None, None, True), "must be an even number"),
    ],
)
def test_constructor_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantized(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w2_format": 99}, r"w2_format must be in \[0, 14\), a number in frozen.FORMATS, but got 99"),
        ({"w1_scale": None}, "w1_scale must be given: format 1 has scales"),
        ({"w1_scale": torch.ones(2, 512, 8)}, "w1_scale must have a dtype of format 1, but got"),
        ({"w1_scale": torch.ones(2, 512, 7, dtype=torch.uint8)}, r"w1_scale must have shape \[2, 512, 8\]"),
        ({"w1_format": 4}, "w1_scale must be None: format 4 has its scales inside"),
        ({"w1_format": 0, "w1_scale": None}, "w1 must have the dtype of x"),
        ({"w2_zero": torch.zeros(1, 1, 1, dtype=torch.int32)}, "w2_zero must be None for format 1"),
        ({"w1": torch.zeros(2, 512, 24, dtype=torch.uint8)}, "w1_scale must have shape|w1 must have"),
    ],
)
def test_operator_refuses(changes, message):
    arguments, _, _ = frozen_call("mxfp4", **changes)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fmoe_ext.frozen_mlp(*arguments)


def test_mxfp8_has_the_values_of_torch_for_every_code_and_exponent(isa):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    exponent = torch.arange(256, dtype=torch.uint8)
    expected = codes.float() * exponent.view(torch.float8_e8m0fnu).float()[:, None]
    weight = Quantized("mxfp8", codes.expand(1, 256, 256), exponent[None, :, None].expand(1, 256, 8))
    torch.testing.assert_close(weight.dequantize()[0], expected, rtol=0, atol=0, equal_nan=True)
    # each value in a row of its own, where neither infinity nor NaN reaches others
    data = torch.zeros(1, 2 * 126, 32, dtype=torch.uint8)
    data[0, :126, 0], data[0, 126:, 0] = torch.arange(126), torch.arange(128, 254)
    for e in (0, 1, 127, 254):
        one = Quantized(
            "mxfp8", data.view(torch.float8_e4m3fn), torch.full((1, 252, 1), e, dtype=torch.uint8)
        )
        for rows in (1, 20):
            found = frozen.frozen_gemm(torch.eye(32)[:rows], one)[0]
            assert torch.equal(found, one.dequantize()[0, :, 0]), (e, rows)


def test_fp8_with_the_largest_scales_has_the_values_of_torch(isa):
    """256 times a scale above 2^119 is no float, and zero times that NaN."""
    codes = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for scale in (2.0**-149, 1.5 * 2.0**-126, 2.0**119, 1.9 * 2.0**121, 2.0**127):
        data = torch.zeros(1, 127, 32).to(torch.float8_e4m3fn)
        data[0, :, 0] = codes[:127]  # each value in a row of its own
        weight = Quantized("fp8_block", data, torch.full((1, 1, 1), scale))
        for rows in (1, 20):
            found = frozen.frozen_gemm(torch.eye(32)[:rows], weight)[0]  # infinite ones are NaN in other rows
            assert torch.equal(found, weight.dequantize()[0, :, 0]), (scale, rows)


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_has_the_values_of_the_library_for_every_scale_and_code(isa, divides):
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8)
    data = (codes[::2] | codes[1::2] << 4).repeat(256, 2)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    # the last one makes scales subnormal, which a half of them could not be
    for whole in (0.0123, 3.7e5, 1.0, 1.7e-38):
        whole = torch.tensor(1 / whole if divides else whole)
        step = scale.float() / whole if divides else scale.float() * whole
        expected = (values * step[:, None]).repeat(1, 2)
        factors = torch.stack(
            (torch.ones(256), whole.expand(256)) if divides else (whole.expand(256), torch.ones(256)), -1
        )
        weight = Quantized("nvfp4", data[None], scale[None, :, None].expand(1, 256, 2), factors[None])
        torch.testing.assert_close(weight.dequantize()[0], expected, rtol=0, atol=0, equal_nan=True)
        finite = step.isfinite()
        rows = Quantized("nvfp4", *(t[:, finite] for t in (weight.data, weight.scale, weight.zero)))
        for m in (1, 5, 32):
            found = frozen.frozen_gemm(torch.eye(32)[:m], rows)
            assert torch.equal(found, expected[finite].T[:m]), (whole, m)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (None, "w1_zero must be given: format 13 has two factors of each row"),
        (torch.ones(2, 512, 3), r"w1_zero must be float32 \[2, 512, 2\], but got Float \[2, 512, 3\]"),
        (torch.ones(2, 512, 2).double(), r"w1_zero must be float32 \[2, 512, 2\], but got Double"),
    ],
)
def test_operator_refuses_factors_that_do_not_fit(zero, message):
    arguments, _, _ = frozen_call("nvfp4", w1_zero=zero)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fmoe_ext.frozen_mlp(*arguments)


def test_weights_are_equal_to_themselves_alone():
    first, second = (frozen.quantize(torch.ones(1, 2, 32), "q8_0") for _ in range(2))
    assert first == first and first != second
    assert [second, first].index(first) == 1 and len({first, second, first}) == 2


def test_interleaved_rows_of_w2_are_refused():
    arguments, _, weights = frozen_call("mxfp4")
    weights = weights[0], Quantized("mxfp4", weights[1].data, weights[1].scale, interleaved=True)
    function, x = public(arguments, weights)
    with pytest.raises(RuntimeError, match="w2 must not have interleaved rows"):
        function(x)
