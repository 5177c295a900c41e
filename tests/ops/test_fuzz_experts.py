"""grouped_gemm and expert_mlp with random shapes, layouts and instruction sets equal their oracles in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ext import ops
from fmoe_ext.ops.activations import GATED_ACTIVATIONS
from tests.ops import instruction_sets
from tests.ops.fuzz import EXAMPLES, FLOATS, choices, generator, layouts, restride, seeds

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDINGS = 24  # units in the last place that a result may be off, in parts of its largest element

widths = st.integers(0, 40)
isas = st.sampled_from(instruction_sets.ISAS)


@pytest.fixture(autouse=True)
def best_isa():
    with instruction_sets.restored():
        yield


def compare(names, ours, truth, plain):
    for name, mine, true, other in zip(names, ours, truth, plain, strict=True):
        assert mine.shape == true.shape and mine.dtype == other.dtype, name
        if mine.numel() == 0:
            continue
        limit = ROUNDINGS * torch.finfo(mine.dtype).eps * max(true.abs().max().item(), 1.0)
        error = (mine.double() - true).abs().max().item()
        assert error <= limit, f"{name} is off by {error:.2e}, allowed {limit:.2e}"


def both(function, oracle, inputs, grad):
    """Result and gradients by function, by the oracle in float64, and by the oracle in the dtype of the inputs."""

    def run(call, dtype=None):
        given = [
            None if t is None else t.detach().to(t.dtype if dtype is None else dtype).requires_grad_()
            for t in inputs
        ]
        y = call(*given)
        wanted = [t for t in given if t is not None]
        return [y.detach(), *torch.autograd.grad(y, wanted, grad.to(y.dtype), materialize_grads=True)]

    return run(function), run(oracle, torch.float64), run(oracle)


@EXAMPLES
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 4),
    widths,
    widths,
    seeds,
    st.sampled_from(FLOATS),
    layouts,
    st.booleans(),
    isas,
)
def test_grouped_gemm(counts, spare, D, N, seed, dtype, layout, with_bias, isa):
    torch.ops.fmoe_ext._set_cpu_isa(isa)
    random = generator(seed)
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    R, E = sum(counts) + spare, len(counts)
    x = restride(torch.randn(R, D, generator=random).to(dtype), layout)
    weight = (torch.randn(E, N, D, generator=random) / max(D, 1) ** 0.5).to(dtype)
    weight = weight.mT.contiguous().mT if layout == "transposed" else weight
    bias = torch.randn(E, N, generator=random).to(dtype) if with_bias else None
    grad = restride(torch.randn(R, N, generator=random).to(dtype), layout)
    names = ["y", "dx", "dweight", *(["dbias"] if with_bias else [])]

    def call(function):
        return lambda x, weight, bias: function(x, weight, offs, bias)

    compare(names, *both(call(ops.grouped_gemm), call(ops.grouped_gemm_ref), (x, weight, bias), grad))


@EXAMPLES
@given(
    st.tuples(st.integers(0, 16), st.integers(0, 4), st.integers(1, 6)),
    st.tuples(widths, widths),
    seeds,
    st.sampled_from(FLOATS),
    layouts,
    st.sampled_from(sorted(ops.ACTIVATIONS)),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    isas,
)
def test_expert_mlp(size, width, seed, dtype, layout, activation, options, isa):
    torch.ops.fmoe_ext._set_cpu_isa(isa)
    (T, K, E), (D, H) = size, width
    with_b1, with_b2, with_weights, combine = options
    random = generator(seed)
    _, offs, row_idx, inverse = ops.sort_tokens(choices(size, seed), E)

    def draw(*shape, fan_in=1):
        return (torch.randn(shape, generator=random) / max(fan_in, 1) ** 0.5).to(dtype)

    F = 2 * H if activation in GATED_ACTIVATIONS else H
    inputs = (
        restride(draw(T, D), layout),
        draw(E, F, D, fan_in=D),
        draw(E, F) if with_b1 else None,
        draw(E, D, H, fan_in=H),
        draw(E, D) if with_b2 else None,
        restride(draw(T, K), layout) if with_weights else None,
    )
    grad = restride(draw(T if combine else T * K, D), layout)
    names = ["y", "x", "w1", "b1", "w2", "b2", "topk_weights"]
    present = [name for name, t in zip(names, ("y", *inputs), strict=True) if t is not None]

    def call(function):
        return lambda x, *rest: function(x, row_idx, inverse, offs, *rest, activation, combine)

    compare(present, *both(call(ops.expert_mlp), call(ops.expert_mlp_ref), inputs, grad))
