"""quantize(): what plain rounding loses, and the bytes of the gguf package where it rounds the same way."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize as quantize_gguf

from fmoe_ext import frozen
from fmoe_ext.frozen import FORMATS, quantize

# Relative error of normal weights, in the norm, at most; measured 0.115, 0.026, 0.094, 0.0055, 0.080, 0.020, 0.092,
# 0.086, 0.038, 0.080, 0.080, 0.030, 0.095.
LOSS = {
    **{"mxfp4": 0.12, "fp8_block": 0.028, "int4": 0.1, "q8_0": 0.006, "q4_k": 0.085, "q6_k": 0.021},
    **{"nf4": 0.096, "q4_0": 0.09, "q5_k": 0.041, "iq4_nl": 0.084, "iq4_xs": 0.084, "mxfp8": 0.032},
    "nvfp4": 0.1,
}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.03


@pytest.mark.parametrize("name", FORMATS)
def test_loss_of_normal_weights(name):
    weight = normal(2, 160, 512)
    packed = quantize(weight, name)
    assert packed.shape == (2, 160, 512)
    loss = (packed.dequantize() - weight).norm() / weight.norm()
    assert 0 < loss <= LOSS[name]
    of_rows = 0 if packed.zero is None else packed.zero.nbytes
    assert (packed.nbytes - of_rows) * 8 / weight.numel() == pytest.approx(FORMATS[name].bits, abs=0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_values_of_the_format_stay(name):
    weight = quantize(normal(1, 8, 256), name).dequantize()
    weight[:, 3] = 0
    again = quantize(weight, name).dequantize()
    assert torch.equal(again[:, 3], weight[:, 3])
    limit = 1e-6 if name in ("mxfp4", "nf4", "q8_0") else LOSS[name]
    assert (again - weight).norm() <= limit * weight.norm()


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_has_the_bytes_of_the_gguf_package(name):
    weight = normal(2, 5, 256)
    weight[0, 1] = 0
    expected = quantize_gguf(weight.numpy(), GGMLQuantizationType[name.upper()])
    assert np.array_equal(quantize(weight, name).data.numpy(), expected)


def test_fp8_with_partial_blocks():
    weight = normal(1, 200, 160)
    packed = quantize(weight, "fp8_block")
    assert packed.scale.shape == (1, 2, 2)
    assert (packed.dequantize() - weight).norm() <= LOSS["fp8_block"] * weight.norm()


def test_refuses():
    with pytest.raises(ValueError, match='unknown format "q3_k": known are mxfp4, '):
        quantize(normal(1, 2, 256), "q3_k")
    with pytest.raises(
        ValueError, match=r"rows of q4_k must be whole blocks of 256, but got shape \[1, 2, 96\]"
    ):
        quantize(normal(1, 2, 96), "q4_k")
    with pytest.raises(ValueError, match=r"weight must have shape \[E, out, in\], but got \[2, 96\]"):
        quantize(normal(2, 96), "mxfp4")


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_a_format_does_not_hold_are_refused(name):
    """Scales of infinity decoded to NaN, and zeros times infinity too."""
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = normal(1, 2, 256)
        weight[0, 1, 7] = value
        with pytest.raises(ValueError, match="weight must be finite"):
            quantize(weight, name)
    assert quantize(torch.empty(1, 2, 256, device="meta"), name).shape == (1, 2, 256)
    weight = normal(1, 2, 256) * 1e12
    if name in ("q8_0", "q4_0", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"):
        with pytest.raises(
            ValueError, match=r"the scale of a block is .*, and GGUF's formats keep scales in float16"
        ):
            quantize(weight, name)
    else:
        assert (quantize(weight, name).dequantize() - weight).norm() <= 1.1 * LOSS[name] * weight.norm()


def test_nested_scales_of_nf4():
    code = torch.linspace(-1, 1, 256)
    index = torch.arange(600).remainder(256).to(torch.uint8)
    nested = torch.tensor([2.0, 3.0, 5.0])
    got = frozen.nf4_scales(index, nested, code, 0.25)
    assert torch.equal(got[:256], code * 2 + 0.25) and torch.equal(got[512:], code[:88] * 5 + 0.25)
