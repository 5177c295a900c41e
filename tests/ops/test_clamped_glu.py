"""The clamped gated activations, against plain PyTorch."""

import math

import pytest
import torch

from fmoe_ext.experts import ClampedSwiGLU, FusedExperts, GatedActivation
from fmoe_ext.ops import clamped_glu, clamped_glu_ref

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
OPTIONS = {
    "GPT-OSS": {"alpha": 1.702, "limit": 1.5, "offset": 1.0, "interleaved": True},
    "MiniMax-M3": {"alpha": 1.702, "limit": 1.5, "offset": 1.0},
    "DeepSeek-V4": {"limit": 1.0},
    "Step 3.7": {"limit": 0.5, "clamps_activated": True},
    "no clamp": {},
}


def values_and_gradient(function, h, options):
    h = h.clone().requires_grad_()
    out = function(h, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out, torch.autograd.grad(out, h, grad.to(out.dtype))[0]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_clamped_glu_any_width_equals_pytorch(isa, name, dtype):
    for width in (0, 1, 7, 8, 16, 17, 63, 64, 65, 130):
        h = (3 * torch.randn(5, 2 * width)).to(dtype)
        ours = values_and_gradient(clamped_glu, h, OPTIONS[name])
        expected = values_and_gradient(clamped_glu_ref, h.double(), OPTIONS[name])
        tolerance = TOLERANCES[dtype]
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_clamped_glu_special_values_equal_pytorch(isa, name, dtype):
    limit = OPTIONS[name].get("limit", 2.0)
    special = torch.tensor([math.nan, math.inf, -math.inf, limit, -limit, 0.0, 100.0, -100.0], dtype=dtype)
    h = torch.cartesian_prod(special, special).T
    h = h.reshape(1, -1) if not OPTIONS[name].get("interleaved") else h.T.reshape(1, -1)
    ours, expected = (clamped_glu(h, **OPTIONS[name]), clamped_glu_ref(h, **OPTIONS[name]))
    torch.testing.assert_close(ours, expected, equal_nan=True)
    finite = h.masked_fill(~h.isfinite(), limit)
    _, ours = values_and_gradient(clamped_glu, finite, OPTIONS[name])
    _, expected = values_and_gradient(clamped_glu_ref, finite, OPTIONS[name])
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_clamped_glu_gradient_of_nan_equals_pytorch(isa, name):
    h = torch.full((9, 4), 0.25).index_fill(0, torch.tensor([3, 8]), math.nan).T.flatten()[None]
    h = torch.cat((h, h.flip(1)), 1)  # NaN as gate and as up, in other places of a vector
    _, ours = values_and_gradient(clamped_glu, h, OPTIONS[name])
    _, expected = values_and_gradient(clamped_glu_ref, h, OPTIONS[name])
    torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("function", [clamped_glu, clamped_glu_ref])
def test_clamped_glu_gradient_at_the_limit_is_that_below_it(function):
    """torch.clamp has 1 there up to torch 2.13 and 0 since 2.14 (pytorch#184574)."""
    h = torch.tensor([[2.0, 2.0, 3.0, 0.5, 2.0, -2.0, 0.5, 3.0]])  # four gates, four ups
    _, grad = values_and_gradient(lambda h, **options: function(h, **options).sum(), h, {"limit": 2.0})
    _, below = values_and_gradient(
        lambda h, **options: function(h, **options).sum(), h, {"limit": 2.0 + 2e-7}
    )
    assert (grad != 0).tolist() == [[True, True, False, True, True, True, True, False]]
    torch.testing.assert_close(grad, below)


@pytest.mark.parametrize("shape", [(3_000, 70), (2, 20_000)])
def test_clamped_glu_any_number_of_threads_gives_the_same_bits(isa, shape):
    h, threads = torch.randn(shape), torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(values_and_gradient(clamped_glu, h, OPTIONS["GPT-OSS"]))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    rows = torch.cat([clamped_glu(row, **OPTIONS["GPT-OSS"]) for row in h[:40].split(1)])
    assert torch.equal(rows, results[0][0][:40])


def test_clamped_glu_of_views_and_more_dimensions_equals_that_of_rows():
    h = torch.randn(4, 6, 24)
    expected = clamped_glu(h.reshape(24, 24), limit=1.0).reshape(4, 6, 12)
    assert torch.equal(clamped_glu(h, limit=1.0), expected)
    assert torch.equal(clamped_glu(h.mT.contiguous().mT, limit=1.0), expected)
    assert torch.func.vmap(lambda h: clamped_glu(h, limit=1.0))(h).equal(expected)
    grad = torch.func.grad(lambda h: clamped_glu(h, limit=1.0).sum())(h)
    torch.testing.assert_close(grad, torch.func.grad(lambda h: clamped_glu_ref(h, limit=1.0).sum())(h))


def test_clamped_glu_gradcheck():
    h = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    for options in OPTIONS.values():
        assert torch.autograd.gradcheck(lambda h, options=options: clamped_glu(h, **options), h)


@pytest.mark.cpu("PyTorch computes it elsewhere")
def test_second_derivative_of_clamped_glu_is_refused():
    h = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        (grad,) = torch.autograd.grad(clamped_glu(h).sum(), h, create_graph=True)
        torch.autograd.grad(grad.sum(), h)


@pytest.mark.cpu("PyTorch computes it elsewhere")
def test_clamped_glu_opcheck():
    h = torch.randn(3, 10, requires_grad=True)
    torch.library.opcheck(torch.ops.fmoe_ext.clamped_glu, (h, 1.0, 2.0, 0.0, True, False))
    arguments = (torch.randn(3, 5), h.detach(), 1.0, 2.0, 0.0, True, False)
    torch.library.opcheck(torch.ops.fmoe_ext.clamped_glu_backward, arguments)


@pytest.mark.cpu("PyTorch computes it elsewhere")
def test_clamped_glu_gradient_of_another_width_is_refused():
    native = torch.ops.fmoe_ext.clamped_glu_backward
    with pytest.raises(RuntimeError, match=r"grad must have shape \[R, H\] with size 2 in dimension 1"):
        native(torch.randn(3, 3), torch.randn(3, 4), 1.0, 2.0, 0.0, False, False)


@pytest.mark.cpu("PyTorch computes it elsewhere")
@pytest.mark.parametrize(
    "activation",
    [
        ClampedSwiGLU(1.5, 0.6),
        GatedActivation(torch.nn.SiLU(), 0.3),
        GatedActivation(torch.nn.functional.silu, 0.3, 1.0),
        GatedActivation(torch.nn.SiLU(), None, 0.5),
    ],
    ids=["ClampedSwiGLU", "module", "function with offset", "no limit"],
)
def test_experts_with_clamped_activation_run_one_operator(activation):
    counts = torch.tensor([3, 0, 4])
    experts = FusedExperts(3, 6, 10, activation).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours = experts(x, counts)
        ours.square().sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"fmoe_ext::clamped_glu", "fmoe_ext::clamped_glu_backward"} <= names
    got, x.grad = x.grad, None
    expected = experts.h4toh(activation(experts.htoh4(x, counts)), counts)
    expected.square().sum().backward()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(got, x.grad)


def test_experts_with_clamp_of_another_activation_run_it():
    experts = FusedExperts(1, 4, 6, GatedActivation(torch.nn.ReLU(), 0.3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        experts(torch.randn(5, 4), torch.tensor([5]))
    assert "fmoe_ext::clamped_glu" not in {event.key for event in profile.key_averages()}


class Elsewhere(torch.Tensor):
    """A tensor that says it is elsewhere: the checks come before PyTorch's products."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    "to",
    [lambda h: h, lambda h: h.to("meta"), lambda h: h.as_subclass(Elsewhere)],
    ids=["here", "meta", "cuda"],
)
def test_clamped_glu_wrong_arguments_are_refused_alike_on_every_device(to):
    for h, options, message in (
        (torch.randn(3, 5), {}, r"h must have shape \[R, 2 H\], but got shape \[3, 5\]"),
        (torch.tensor(1.0), {}, r"h must have shape \[R, 2 H\], but got shape \[\]"),
        (torch.randn(3, 4), {"limit": -1.0}, "limit must be at least 0, but got -1"),
        (torch.ones(3, 4, dtype=torch.int64), {}, "h must be float64, float32, bfloat16 or float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            clamped_glu(to(h), **options)
