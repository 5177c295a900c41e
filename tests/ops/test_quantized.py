"""Packed weights: decoding against the formats' reference libraries, and frozen_mlp with them."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from fmoe_ext import ops
from fmoe_ext.ops import FORMATS, Lora, Quantized, frozen_mlp, frozen_mlp_ref
from fmoe_ext.testing import assert_close
from tests.ops.test_expert_mlp import Problem


def random_bytes(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def packed(name, E, out, width, seed=0):
    """A weight of random codes whose values are about 1 / sqrt(width)."""
    generator = torch.Generator().manual_seed(seed)
    size = width**-0.5

    def scales(*shape):
        return (torch.rand(shape, generator=generator) + 0.5) * size

    if name == "mxfp4":
        exponent = torch.randint(120, 123, (E, out, width // 32), dtype=torch.uint8, generator=generator)
        return Quantized(name, random_bytes(E, out, width // 32, 16, seed=seed), exponent)
    if name == "fp8_block":
        data = torch.randn(E, out, width, generator=generator).to(torch.float8_e4m3fn)
        return Quantized(name, data, scales(E, -(-out // 128), -(-width // 128)))
    if name == "int4":
        words = random_bytes(E, out, width // 2, seed=seed).view(torch.int32)
        return Quantized(name, words, (scales(E, out, width // 32) / 8).bfloat16())
    if name == "nf4":
        return Quantized(name, random_bytes(E, out, width // 2, seed=seed), scales(E, out, width // 64))
    block, size_of = {"q8_0": (32, 34), "q4_k": (256, 144), "q6_k": (256, 210)}[name]
    blocks = random_bytes(E, out, width // block, size_of, seed=seed)
    places = {"q8_0": [0], "q4_k": [0, 2], "q6_k": [208]}[name]
    for place in places:
        small = (scales(E, out, width // block, 1) / (100 if name == "q8_0" else 500)).half()
        blocks[..., place : place + 2] = small.view(torch.uint8)
    return Quantized(name, blocks.flatten(2))


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k"])
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
            *(t["x"], problem.row_idx, problem.inverse, problem.offs, first, t["b1"], second, t["b2"]),
            *(t["topk_weights"], "swiglu", True, Lora(t["a"], t["b"], 0.5)),
        )
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
        return ops.frozen_mlp(
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
    scale, zero, number = weight.scale_and_zero()
    _, h, _, _ = torch.ops.fmoe_ext.frozen_mlp(
        *(x, sorted_tokens.row_idx, sorted_tokens.inverse, sorted_tokens.offs, weight.rows(), None, w2, None),
        *(None, None, 1.0, None, None, 1.0, None, 2, True, True, scale, zero, number),
    )
    return h


def gradient_by_w2(weight, grad):
    """grad times the weight of expert 1 of 2, by the operator: w1 is an identity and relu's slope 1."""
    _, out, width = weight.shape
    sorted_tokens = ops.sort_tokens(torch.ones(len(grad), 1, dtype=torch.long), 2)
    w1 = torch.eye(width, out, dtype=grad.dtype).expand(2, width, out).contiguous()
    x = torch.ones(len(grad), out, dtype=grad.dtype, requires_grad=True)
    y = frozen_mlp(
        *(x, sorted_tokens.row_idx, sorted_tokens.inverse, sorted_tokens.offs, w1, None, weight, None),
        *(None, "relu"),
    )
    return torch.autograd.grad(y, x, grad)[0][:, :width]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_decode_to_the_bits_of_dequantize(isa, name, dtype):
    width, out = 256, 259
    weight = packed(name, 2, out, width, seed=3)
    expected = weight.dequantize(dtype)[1]
    ones = torch.eye(width, dtype=dtype)
    for rows in (width, 20, 5, 4, 3, 2, 1):  # panels; decoded into a buffer; in registers
        assert torch.equal(pre_activation(weight, ones[-rows:]), expected.T[-rows:]), rows
    for rows in (45, 7):
        assert torch.equal(gradient_by_w2(weight, torch.eye(out, dtype=dtype)[-rows:]), expected[-rows:]), (
            rows
        )
