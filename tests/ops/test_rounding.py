"""frozen.rounding: a packed weight with a change, rounded by the inputs that it multiplies."""

import pytest
import torch

from fmoe_ext import frozen
from fmoe_ext.frozen.rounding import ROUNDED, error_of, round_packed, shrunk_moments, to_nearest

OUT, IN = 24, 256


def inputs(decay, count=1024, seed=0):
    """Rows whose standard deviations along random directions fall as i^-decay."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(IN, IN, generator=torch.Generator().manual_seed(9)))[0]
    rows = torch.randn(count, IN, generator=generator) * torch.arange(1, IN + 1) ** -float(decay)
    return rows @ turn.T


def case(format, size, seed=0):
    """(packed weight, its values, a change of rank 4 that is `size` of them)."""
    generator = torch.Generator().manual_seed(seed)
    packed = frozen.quantize(torch.randn(1, OUT, IN, generator=generator), format)
    weight = packed.dequantize()[0]
    change = torch.randn(OUT, 4, generator=generator) @ torch.randn(4, IN, generator=generator)
    return packed, weight, change * size * weight.norm() / change.norm()


def ratio(found, weight, change, rows):
    """Error on rows, relative to leaving the change out."""
    moments = rows.T @ rows
    errors = (error_of(value, moments).sum() for value in (found - weight - change, change))
    return (next(errors) / next(errors)).sqrt().item()


@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("size, bar", [(0.05, 0.5), (0.01, 1.0)])
def test_error_on_other_inputs_is_below_that_of_no_change(format, size, bar):
    packed, weight, change = case(format, size)
    found, ways = round_packed(packed, weight + change, shrunk_moments(inputs(1)))
    assert sum(ways.values()) == OUT and found.data.shape == packed.data.shape
    assert ratio(found.dequantize()[0], weight, change, inputs(1, seed=1)) < bar
    nearest = frozen.quantize((weight + change)[None], format).dequantize()[0]
    if (format, size) != ("mxfp8", 0.05):  # whose steps are smaller than this change
        assert ratio(nearest, weight, change, inputs(1, seed=1)) > 1


def test_small_change_for_white_inputs_leaves_mxfp4_as_it_is():
    """The nearest point of the lattice is the one that the weight is on: no rounding is better."""
    packed, weight, change = case("mxfp4", 0.005)
    found, ways = round_packed(packed, weight + change, torch.eye(IN))
    assert ways == {"file": OUT} and torch.equal(found.data, packed.data)


@pytest.mark.parametrize("format", ROUNDED)
def test_no_row_errs_more_than_without_the_change(format):
    packed, weight, change = case(format, 0.02, seed=3)
    moments = shrunk_moments(inputs(0.5))
    found, _ = round_packed(packed, weight + change, moments)
    errors = error_of(found.dequantize()[0] - weight - change, moments)
    assert (errors <= error_of(change, moments) * (1 + 1e-4)).all()


@pytest.mark.parametrize("format", [name for name in ROUNDED if name != "nvfp4"])
def test_nearest_values_have_the_better_scale_of_each_block(format):
    packed, weight, change = case(format, 0.3)
    assert torch.equal(to_nearest(packed, weight).dequantize()[0], weight)
    target = weight + change
    grid = packed.kind.grid(packed)
    width = IN // grid.step.shape[2]
    step, low = (t[0].repeat_interleave(width, -1)[..., None] for t in (grid.step, grid.low))
    levels = step * grid.values - low
    kept = levels.gather(-1, (levels - target[..., None]).abs().argmin(-1, keepdim=True))[..., 0]
    fresh, found = (
        q.dequantize()[0] for q in (frozen.quantize(target[None], format), to_nearest(packed, target))
    )
    block = packed.kind.block
    errors = [(v - target).square().unflatten(1, (-1, block)).sum(-1) for v in (found, kept, fresh)]
    torch.testing.assert_close(errors[0], torch.minimum(*errors[1:]), rtol=1e-4, atol=1e-6)
    assert (errors[1] < errors[2]).any() and (errors[2] < errors[1]).any()


def test_nearest_values_of_nvfp4_keep_the_factor_of_the_matrix():
    """Each block of 16 errs no more than with its scale as it was, and all together hardly more than packed anew."""
    packed, weight, change = case("nvfp4", 0.3)
    assert torch.equal(to_nearest(packed, weight).dequantize()[0], weight)
    target = weight + change
    found = to_nearest(packed, target)
    assert torch.equal(found.zero, packed.zero) and found.scale.dtype == packed.scale.dtype
    levels = (
        packed.kind.grid(packed).values
        * packed.kind.grid(packed).step[0].repeat_interleave(16, -1)[..., None]
    )
    kept = levels.gather(-1, (levels - target[..., None]).abs().argmin(-1, keepdim=True))[..., 0]
    fresh = frozen.quantize(target[None], "nvfp4").dequantize()[0]
    errors = [
        (v - target).square().unflatten(1, (-1, 16)).sum(-1) for v in (found.dequantize()[0], kept, fresh)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-4) + 1e-6).all() and (errors[0] < errors[1]).any()
    assert errors[0].sum() < 1.02 * errors[2].sum()


def test_zero_points_and_groups_of_128_are_kept():
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (1, OUT, IN // 8), generator=generator, dtype=torch.int64).int()
    zero = torch.randint(-(2**31), 2**31, (1, OUT // 8, 2), generator=generator, dtype=torch.int64).int()
    packed = frozen.Quantized("int4", words, torch.rand(1, OUT, 2, generator=generator) + 0.5, zero)
    weight = packed.dequantize()[0]
    change = 0.05 * torch.randn(OUT, IN, generator=generator)
    found, ways = round_packed(packed, weight + change, shrunk_moments(inputs(1)))
    assert torch.equal(found.zero, zero) and ways.keys() <= {"file", "kept", "refitted"}
    assert ratio(found.dequantize()[0], weight, change, inputs(1, seed=1)) < 1


@pytest.mark.parametrize("format", ["nf4", "q8_0", "fp8_block", "q6_k", "q4_0", "q5_k", "iq4_xs"])
def test_other_formats_are_refused(format):
    packed = frozen.quantize(torch.randn(1, OUT, IN), format)
    with pytest.raises(
        ValueError, match=f"^{format} is not rounded by second moments: mxfp4, int4, q4_k, mxfp8, nvfp4 are"
    ):
        round_packed(packed, packed.dequantize()[0], torch.eye(IN))


def test_other_shapes_are_refused():
    packed = frozen.quantize(torch.randn(1, OUT, IN), "mxfp4")
    with pytest.raises(ValueError, match=r"^target must be \[out, in\] of packed .* but got \[24, 128\]"):
        round_packed(packed, torch.zeros(OUT, 128), torch.eye(IN))


def test_moments_of_few_rows_are_drawn_to_the_prior():
    prior = torch.eye(IN)
    far, near = ((shrunk_moments(inputs(0, n), prior) - prior).norm() for n in (4, 4096))
    plain = inputs(0, 4).T @ inputs(0, 4) / 4
    assert far < 0.2 * (plain - prior).norm() and near < 0.1 * prior.norm()
    assert torch.equal(shrunk_moments(inputs(0, 0), prior), prior)
