"""Packed weights of every format decoded by cuda/, with the bits of the CPU's decoders, through the emulator."""

import pytest
import torch

from fmoe_ext.frozen import Quantized, formats
from tests.ops.test_quantized import packed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(emulated, weight, dtype):
    scale, zero, number, interleaved = weight.packing()
    found = emulated._decode_packed(weight.rows(), scale, zero, number, interleaved, dtype)
    expected = weight.dequantize(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_every_format(emulated, name):
    """More rows than a block of threads has warps, two experts, gates and ups in turn."""
    weight = packed(name, 2, 10, 512)
    for dtype in DTYPES:
        check(emulated, weight, dtype)
    turned = Quantized(weight.format, weight.data, weight.scale, weight.zero, interleaved=True)
    check(emulated, turned, torch.bfloat16)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_block", "mxfp8"])
def test_every_code_of_every_scale(emulated, name):
    """NaN, subnormal scales and numbers, infinities where a scale leaves bfloat16's range."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = codes.view(256, 1).repeat(1, 16)
    if name == "mxfp4":
        weight = Quantized(name, codes.repeat(256, 1).view(1, 256, 16, 16), scales.view(1, 256, 16))
    elif name == "nvfp4":
        factors = torch.tensor([1.5, 3.0]).repeat(1, 256, 1)
        weight = Quantized(
            name, codes.repeat(256, 1)[None], scales.repeat(1, 2)[None].view(torch.float8_e4m3fn), factors
        )
    elif name == "mxfp8":
        weight = Quantized(name, codes.repeat(256, 1)[None].view(torch.float8_e4m3fn), scales[None, :, :8])
    else:
        factors = torch.tensor([1e-3, 3e38]).view(1, 2, 1).repeat(1, 1, 2)
        weight = Quantized(name, codes.repeat(256, 1)[None].view(torch.float8_e4m3fn), factors)
    for dtype in DTYPES[:3]:
        check(emulated, weight, dtype)


def test_widths_that_are_no_multiple_of_a_vector(emulated):
    """fp8_block has rows of any width; scales of partial squares, and of parts that were packed apart."""
    data = torch.randn(2, 260, 131, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    check(emulated, Quantized("fp8_block", data, torch.rand(2, 3, 2)), torch.bfloat16)
    check(emulated, Quantized("fp8_block", data, torch.rand(2, 2, 2, 2).bfloat16()), torch.bfloat16)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_of_groups_with_zero_points(emulated, scale):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31 - 1, (2, 10, 16), generator=generator, dtype=torch.int32)
    zero = torch.randint(-(2**31), 2**31 - 1, (2, 2, 2), generator=generator, dtype=torch.int32)
    weight = Quantized("int4", words, torch.rand(2, 10, 2, generator=generator).to(scale), zero)
    check(emulated, weight, torch.bfloat16)


def test_bytes_that_begin_anywhere(emulated):
    """A row of a file need not be aligned."""
    weight = packed("nf4", 1, 3, 128)
    for shift in (1, 2):
        held = torch.zeros(weight.data.numel() + shift, dtype=torch.uint8)[shift:].view(weight.data.shape)
        held.copy_(weight.data)
        check(emulated, Quantized("nf4", held, weight.scale), torch.bfloat16)


def test_rejects_with_the_values(emulated):
    data = torch.zeros(1, 2, 16, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="weight_scale must be given: format 1 has scales"):
        emulated._decode_packed(data, None, None, 1, False, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"weight_format must be in \[0, 14\)"):
        emulated._decode_packed(data, None, None, 14, False, torch.bfloat16)
    with pytest.raises(RuntimeError, match="weight_format must be that of a packed weight"):
        emulated._decode_packed(data, None, None, 0, False, torch.bfloat16)
