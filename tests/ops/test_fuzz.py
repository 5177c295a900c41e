"""Every routing op with random arguments: valid ones equal the oracle, broken ones raise RuntimeError."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmoe_ext import ops

EXAMPLES = settings(
    max_examples=500, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ANY_DTYPE = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.bool)
INDEX_ERRORS = ("too large", "too small", "dtype", "dim")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}

sizes = st.tuples(st.integers(0, 40), st.integers(0, 5), st.integers(1, 20))  # T, K, E
seeds = st.integers(0, 2**31 - 1)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def restride(t, layout):
    """The same values, laid out differently."""
    if layout == "transposed":
        return t.t().contiguous().t()
    if layout == "strided":
        return torch.stack([t, t], dim=-1)[..., 1]
    return t


layouts = st.sampled_from(["contiguous", "transposed", "strided"])


def choices(size, seed, dtype=torch.int64, layout="contiguous"):
    T, K, E = size
    return restride(torch.randint(-1, E, (T, K), generator=generator(seed), dtype=dtype), layout)


def broken_index(index, end, error, position):
    """index [...] with one fault; None where it is too small to hold that fault."""
    if error == "dtype":
        return index.float()
    if error == "dim":
        return index.unsqueeze(0)
    if index.numel() == 0:
        return None
    index = index.clone().contiguous()
    index.view(-1)[position % index.numel()] = (
        end + position % 3 if error == "too large" else -2 - position % 3
    )
    return index


def assert_raises(function, *args):
    with pytest.raises(RuntimeError, match=r"must|only"):
        function(*args)


def close(ours, expected):
    tolerance = TOLERANCES[ours.dtype]
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


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
@given(sizes, seeds, st.sampled_from((*INDEX_ERRORS, "num_experts", "capacity")), st.integers(0, 1000))
def test_counting_ops_broken(size, seed, error, position):
    E = size[2]
    topk_idx = choices(size, seed)
    if error == "num_experts":
        for function in (ops.count_tokens, ops.sort_tokens):
            assert_raises(function, topk_idx, -position)
        assert_raises(ops.apply_capacity, topk_idx, E, torch.ones(E + 1 + position % 3, dtype=torch.int64))
        return
    if error == "capacity":
        capacity = torch.ones(E, dtype=torch.int64)
        capacity[position % E] = -1 - position
        assert_raises(ops.apply_capacity, topk_idx, E, capacity)
        assert_raises(ops.apply_capacity, topk_idx, E, -1 - position)
        assert_raises(ops.apply_capacity, topk_idx, E, torch.ones(E))
        return
    broken = broken_index(topk_idx, E, error, position)
    if broken is not None:
        assert_raises(ops.count_tokens, broken, E)
        assert_raises(ops.sort_tokens, broken, E)
        assert_raises(ops.apply_capacity, broken, E, 3)


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


@EXAMPLES
@given(
    sizes,
    st.integers(1, 9),
    seeds,
    st.sampled_from(("row_idx", "inverse")),
    st.sampled_from((*INDEX_ERRORS, "rows", "weights")),
    st.integers(0, 1000),
)
def test_permute_and_unpermute_broken(size, width, seed, name, error, position):
    T, K, E = size
    sort = ops.sort_tokens(choices(size, seed), E)
    x, y, weights = torch.randn(T, width), torch.randn(T * K, width), torch.randn(T, K)
    backward = torch.ops.fmoe_ext.unpermute_backward
    if error == "rows":
        more = 1 + position % 3
        assert_raises(ops.permute, torch.randn(T + more, width), sort.row_idx, sort.inverse)
        assert_raises(ops.unpermute, torch.randn(T * K + more, width), sort.row_idx, sort.inverse, weights)
        assert_raises(backward, x, torch.randn(T * K, width + more), sort.row_idx, sort.inverse, weights)
        return
    if error == "weights":
        for bad in (
            torch.randn(T, K + 1),
            torch.randn(T + 1, K),
            weights.long(),
            weights.half(),
            weights.flatten(),
        ):
            assert_raises(ops.unpermute, y, sort.row_idx, sort.inverse, bad)
            assert_raises(backward, x, y, sort.row_idx, sort.inverse, bad)
        return
    broken = broken_index(getattr(sort, name), T * K, error, position)
    if broken is None:
        return
    index = (broken, sort.inverse) if name == "row_idx" else (sort.row_idx, broken)
    if error in ("dtype", "dim"):
        assert_raises(ops.permute, x, *index)
        assert_raises(ops.unpermute, y, *index, weights)
        assert_raises(backward, x, y, *index, weights)
    elif name == "row_idx":  # permute and the backward read the values of row_idx, unpermute those of inverse
        assert_raises(ops.permute, x, *index)
        assert_raises(backward, x, y, *index, weights)
    else:
        assert_raises(ops.unpermute, y, *index, weights)


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


@settings(EXAMPLES, max_examples=1000)
@given(gates(), st.integers(0, 20), seeds, st.sampled_from(FLOATS), layouts, st.booleans(), st.booleans())
def test_topk_gate(gate, T, seed, dtype, layout, biased, coarse):
    arguments, E = gate
    random = generator(seed)
    logits = torch.randn(T, E, generator=random).to(dtype)
    if coarse and not biased and arguments["score"] == "softmax":  # many equal logits, exact in every dtype
        logits = logits.round()
    logits = restride(logits, layout).requires_grad_()
    bias = torch.randn(E, generator=random, dtype=torch.float64).to(dtype) if biased else None
    topk_idx, weights = ops.topk_gate(logits, bias=bias, **arguments)
    expected_idx, expected = ops.topk_gate_ref(logits, bias=bias, **arguments)
    exact = dtype == torch.float64 or not (biased or arguments["score"] == "sigmoid")
    same = (topk_idx == expected_idx).all(
        1
    )  # scores may round to another order in float32, though hardly ever
    assert same.all() if exact else same.sum() >= T - 1
    close(weights[same], expected[same])
    grad = torch.randn(weights[same].shape, generator=random).to(dtype)
    (ours,) = torch.autograd.grad(weights[same], logits, grad)
    (theirs,) = torch.autograd.grad(expected[same], logits, grad)
    torch.testing.assert_close(ours, theirs, rtol=10 * TOLERANCES[dtype], atol=10 * TOLERANCES[dtype])


GATE_ERRORS = ("top_k", "score", "num_groups", "topk_groups", "bias", "dtype", "dim", "experts")


@EXAMPLES
@given(gates(), st.integers(0, 20), seeds, st.sampled_from(GATE_ERRORS), st.integers(1, 1000))
def test_topk_gate_broken(gate, T, seed, error, amount):
    arguments, E = gate
    logits = torch.randn(T, E, generator=generator(seed))
    topk_idx, weights = ops.topk_gate(logits, **arguments)
    score, normalize = arguments["score"], arguments["normalize"]
    if T > 0:
        bad_idx = topk_idx.clone()
        bad_idx[amount % T, amount % topk_idx.shape[1]] = E + amount if amount % 2 else -amount
        assert_raises(
            torch.ops.fmoe_ext.topk_gate_backward, weights, logits, bad_idx, weights, score, normalize, 1.0
        )
    if error == "top_k":
        arguments["top_k"] = E + amount if amount % 2 else -amount
    elif error == "score":
        arguments["score"] += "x" * amount
    elif error == "num_groups":
        arguments["num_groups"] = E + amount if amount % 2 else -amount
    elif error == "topk_groups":
        arguments["topk_groups"] = arguments["num_groups"] + amount if amount % 2 else 1 - amount
    elif error == "bias":
        arguments["bias"] = torch.zeros(E + amount)
    elif error == "dtype":
        logits = logits.long()
    elif error == "dim":
        logits = logits.unsqueeze(0)
    else:
        logits = logits[:, :0]
    assert_raises(lambda: ops.topk_gate(logits, **arguments))
