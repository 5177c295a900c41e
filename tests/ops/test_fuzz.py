"""The routing operators with random arguments in any layout equal their oracles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmoe_ext import ops
from tests.ops.fuzz import (
    EXAMPLES,
    FLOATS,
    TOLERANCES,
    choices,
    close,
    generator,
    layouts,
    restride,
    seeds,
    sizes,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ANY_DTYPE = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.bool)


@EXAMPLES
@given(sizes, seeds, st.sampled_from([torch.int64, torch.int32]), layouts, st.integers(0, 30))
def test_counting_ops(size, seed, dtype, layout, limit):
    E = size[2]
    topk_idx = choices(size, seed, dtype, layout)
    assert torch.equal(ops.count_tokens(topk_idx, E), ops.count_tokens_ref(topk_idx, E))
    assert all(map(torch.equal, ops.sort_tokens(topk_idx, E), ops.sort_tokens_ref(topk_idx, E)))
    capacity = torch.randint(0, limit + 1, (E,), generator=generator(seed))
    for c in (limit, capacity):
        assert torch.equal(ops.apply_capacity(topk_idx, E, c), ops.apply_capacity_ref(topk_idx, E, c))


@EXAMPLES
@given(sizes, st.integers(0, 70), seeds, st.sampled_from(ANY_DTYPE), layouts, st.booleans())
def test_permute(size, width, seed, dtype, layout, trim):
    sort = ops.sort_tokens(choices(size, seed), size[2])
    row_idx = sort.row_idx[: sort.offs[-1]] if trim else sort.row_idx
    x = restride((9 * torch.randn(size[0], width, generator=generator(seed))).to(dtype), layout)
    assert torch.equal(ops.permute(x, row_idx, sort.inverse), ops.permute_ref(x, row_idx, sort.inverse))


@EXAMPLES
@given(
    sizes,
    st.integers(0, 70),
    seeds,
    st.sampled_from(FLOATS),
    layouts,
    st.sampled_from(["none", "float32", "same"]),
)
def test_unpermute(size, width, seed, dtype, layout, kind):
    T, K, E = size
    random = generator(seed)
    sort = ops.sort_tokens(choices(size, seed), E)
    y = restride(torch.randn(T * K, width, generator=random).to(dtype), layout).requires_grad_()
    weights = restride(
        torch.randn(T, K, generator=random).to(dtype if kind == "same" else torch.float32), layout
    )
    weights = None if kind == "none" else weights.requires_grad_()
    inputs = [t for t in (y, weights) if t is not None]
    grad = torch.randn(T, width, generator=random).to(dtype)
    ours = ops.unpermute(y, sort.row_idx, sort.inverse, weights)
    expected = ops.unpermute_ref(y, sort.row_idx, sort.inverse, weights)
    close(ours, expected)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        tolerance = max(TOLERANCES[dtype], TOLERANCES[mine.dtype])
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=10 * tolerance)


@st.composite
def gates(draw):
    num_groups, size = draw(st.integers(1, 6)), draw(st.integers(1, 60))
    topk_groups = draw(st.integers(1, num_groups))
    return {
        "top_k": draw(st.integers(1, min(topk_groups * size, 40))),
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": draw(st.booleans()),
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "scale": draw(st.sampled_from([1.0, 2.5])),
    }, num_groups * size


@EXAMPLES
@given(gates(), st.integers(0, 20), seeds, st.sampled_from(FLOATS), layouts, st.booleans(), st.booleans())
def test_topk_gate(gate, T, seed, dtype, layout, biased, coarse):
    arguments, E = gate
    random = generator(seed)
    exact = dtype == torch.float64 or not (biased or arguments["score"] == "sigmoid")
    logits = torch.randn(T, E, generator=random).to(dtype)
    if coarse and not biased and arguments["score"] == "softmax":  # many equal logits, exact in every dtype
        logits = logits.round()
    if exact or layout not in ("expanded", "overlapping"):
        logits = restride(logits, layout)
    logits.requires_grad_()
    bias = torch.randn(E, generator=random, dtype=torch.float64).to(dtype) if biased else None
    topk_idx, weights = ops.topk_gate(logits, bias=bias, **arguments)
    expected_idx, expected = ops.topk_gate_ref(logits, bias=bias, **arguments)
    same = (topk_idx == expected_idx).all(1)  # float32 scores may round to another order, though hardly ever
    assert same.all() if exact else same.sum() >= T - 1
    close(weights[same], expected[same])
    grad = torch.randn(weights[same].shape, generator=random).to(dtype)
    (ours,) = torch.autograd.grad(weights[same], logits, grad)
    (theirs,) = torch.autograd.grad(expected[same], logits, grad)
    close(ours, theirs, 10 * TOLERANCES[dtype])


@EXAMPLES
@given(gates(), st.integers(1, 6), seeds, st.sampled_from(FLOATS), st.booleans())
def test_topk_gate_of_values_that_are_not_finite(gate, T, seed, dtype, normalize):
    """NaN first, then infinity, equal ones by index; weights as the oracle's, NaN included."""
    arguments, E = gate
    arguments |= {"score": "softmax", "normalize": normalize, "num_groups": 1, "topk_groups": 1}
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    logits = values[torch.randint(0, 6, (T, E), generator=generator(seed))].to(dtype)
    topk_idx, weights = ops.topk_gate(logits, **arguments)
    expected_idx, expected = ops.topk_gate_ref(logits, **arguments)
    assert torch.equal(topk_idx, expected_idx)
    torch.testing.assert_close(weights, expected, equal_nan=True)
