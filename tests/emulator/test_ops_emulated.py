"""The ops of cuda/ against the oracles of fmoe_ext.ops, on CPU tensors through the emulator."""

import emu_build
import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.ops.topk_gate import SCORES, weights_ref
from fmoe_ext.testing import assert_close
from tests.ops import test_fuzz_broken
from tests.ops.fuzz import assert_raises

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_idx(T, K, E, dtype=torch.int64, seed=0, dropped=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1 if dropped else 0, E, (T, K), dtype=dtype, generator=generator)


def check(ours, truth, plain, name):
    if ours.dtype == torch.float64:  # plain is the truth here
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-14, msg=lambda text: f"{name}: {text}")
    else:
        assert_close(ours, truth, plain, name)


def equal_all(ours, expected):
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


SHAPES = [(0, 2, 3), (1, 1, 1), (33, 4, 7), (700, 2, 300), (3000, 3, 5), (64, 2, 4096)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "K", "E"), SHAPES)
def test_count_and_sort_tokens(emulated, T, K, E, dtype):
    topk_idx = random_idx(T, K, E, dtype)
    assert torch.equal(emulated.count_tokens(topk_idx, E), ops.count_tokens_ref(topk_idx, E))
    equal_all(emulated.sort_tokens(topk_idx, E), ops.sort_tokens_ref(topk_idx, E))
    strided = topk_idx.t().contiguous().t()
    equal_all(emulated.sort_tokens(strided, E), ops.sort_tokens_ref(topk_idx, E))


def test_sort_tokens_all_to_one_and_none(emulated):
    for value in (0, 4, -1):
        topk_idx = torch.full((500, 2), value)
        equal_all(emulated.sort_tokens(topk_idx, 5), ops.sort_tokens_ref(topk_idx, 5))


def test_index_out_of_range_counts_as_dropped(emulated):
    wild = torch.tensor([[0, 9], [-7, 2], [2**40, 1]])
    tame = torch.tensor([[0, -1], [-1, 2], [-1, 1]])
    assert torch.equal(emulated.count_tokens(wild, 3), ops.count_tokens_ref(tame, 3))
    equal_all(emulated.sort_tokens(wild, 3), ops.sort_tokens_ref(tame, 3))
    assert torch.equal(emulated.apply_capacity(wild, torch.tensor([5, 5, 5])), tame)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("T", "K", "E"), SHAPES[:5])
def test_apply_capacity(emulated, T, K, E, dtype):
    topk_idx = random_idx(T, K, E, dtype)
    capacity = torch.randint(0, 2 * T * K // E + 2, (E,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        emulated.apply_capacity(topk_idx, capacity), ops.apply_capacity_ref(topk_idx, E, capacity)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.bool])
@pytest.mark.parametrize("D", [1, 3, 24, 200])
def test_permute(emulated, D, dtype):
    routing = ops.sort_tokens_ref(random_idx(37, 3, 5), 5)
    x = torch.randn(37, D).mul(10).to(dtype)
    expected = ops.permute_ref(x, routing.row_idx, routing.inverse)
    assert torch.equal(emulated.permute(x, routing.row_idx, routing.inverse), expected)
    wide = torch.cat([x, x], 1)[:, D // 2 : D // 2 + D]
    expected = ops.permute_ref(wide, routing.row_idx, routing.inverse)
    assert torch.equal(emulated.permute(wide, routing.row_idx, routing.inverse), expected)


@pytest.mark.parametrize("weight_dtype", [None, "same", torch.float32])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("D", [1, 24, 200])
def test_unpermute(emulated, D, dtype, weight_dtype):
    routing = ops.sort_tokens_ref(random_idx(37, 3, 5), 5)
    y = torch.randn(111, D).to(dtype).masked_fill((routing.row_idx < 0).unsqueeze(1), 0)
    weights = None
    if weight_dtype is not None:
        weights = torch.rand(37, 3).to(dtype if weight_dtype == "same" else weight_dtype)
    truth_weights = None if weights is None else weights.double()
    index = (routing.row_idx, routing.inverse)
    ours = emulated.unpermute(y, *index, weights)
    check(
        ours,
        ops.unpermute_ref(y.double(), *index, truth_weights),
        ops.unpermute_ref(y, *index, weights),
        "out",
    )

    grad = torch.randn(37, D).to(dtype)
    if weights is None:
        grad_y, grad_weights = emulated.unpermute_backward(grad, None, *index, None)
        assert torch.equal(grad_y, ops.permute_ref(grad, *index))
        assert grad_weights.numel() == 0
        return

    def grads(y, weights, grad):
        y, weights = y.detach().requires_grad_(), weights.detach().requires_grad_()
        return torch.autograd.grad(ops.unpermute_ref(y, *index, weights), (y, weights), grad)

    ours = emulated.unpermute_backward(grad, y, *index, weights)
    truth, plain = grads(y.double(), weights.double(), grad.double()), grads(y, weights, grad)
    for name, one, true, other in zip(("grad_y", "grad_weights"), ours, truth, plain, strict=True):
        check(one, true, other, name)


GATES = [
    dict(),
    dict(normalize=False),
    dict(score="sigmoid"),
    dict(score="sigmoid", normalize=False, scale=2.5),
    dict(bias=True),
    dict(score="sigmoid", bias=True, num_groups=4, topk_groups=2),
    dict(num_groups=4, topk_groups=2, scale=0.5),
]


def gate_options(options, E):
    options = {
        "score": "softmax",
        "normalize": True,
        "bias": None,
        "num_groups": 1,
        "topk_groups": 1,
        "scale": 1.0,
    } | options
    if options["bias"]:
        options["bias"] = torch.randn(E, generator=torch.Generator().manual_seed(3)) * 0.3
    return options


@pytest.mark.parametrize("options", GATES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("T", "E", "K"), [(21, 8, 3), (9, 100, 7), (3, 40, 40)])
def test_topk_gate(emulated, T, E, K, dtype, options):
    options = gate_options(options, E)
    K = min(K, options["topk_groups"] * E // options["num_groups"])
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(2)).mul(2).to(dtype)
    if dtype != torch.float64:
        logits = logits.bfloat16().to(dtype)  # makes ties
    idx, weights = emulated.topk_gate(
        logits, K, *(options | {"score": SCORES.index(options["score"])}).values()
    )
    expected_idx, plain = ops.topk_gate_ref(logits, K, **options)
    if options["bias"] is None:
        assert torch.equal(idx, expected_idx)
    else:  # scores with a bias differ by rounding: compare what was chosen by value
        scores = logits.double().softmax(-1) if options["score"] == "softmax" else logits.double().sigmoid()
        values = scores + options["bias"]
        assert torch.allclose(values.gather(1, idx), values.gather(1, expected_idx), atol=1e-6)
        plain = weights_ref(logits, idx, options["score"], options["normalize"], options["scale"])
    names = ("score", "normalize", "scale")
    score, normalize, scale = (options[name] for name in names)
    check(weights, weights_ref(logits.double(), idx, score, normalize, scale), plain, "topk_weights")

    grad = torch.randn(T, K, generator=torch.Generator().manual_seed(4)).to(dtype)

    def grad_logits(logits, grad):
        logits = logits.detach().requires_grad_()
        return torch.autograd.grad(weights_ref(logits, idx, score, normalize, scale), logits, grad)[0]

    ours = emulated.topk_gate_backward(grad, logits, idx, weights, SCORES.index(score), normalize, scale)
    check(ours, grad_logits(logits.double(), grad.double()), grad_logits(logits, grad), "grad_logits")


def test_topk_gate_nan_and_infinity(emulated):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, 2, nan], [inf, 1, -0.0, 0.0], [-inf, -inf, -inf, -inf], [1, 1, 1, 1]])
    idx, weights = emulated.topk_gate(logits, 3, 0, True, None, 1, 1, 1.0)
    cpu_idx, cpu_weights = ops.topk_gate(logits, 3)
    assert torch.equal(idx, cpu_idx)
    assert torch.allclose(weights, cpu_weights, equal_nan=True)


def test_rejects_with_the_values(emulated):
    with pytest.raises(RuntimeError, match="int64 or int32, but got Float"):
        emulated.count_tokens(torch.zeros(2, 2), 3)
    with pytest.raises(RuntimeError, match="at most 12288 on CUDA, but got 12289"):
        emulated.sort_tokens(torch.zeros(2, 2, dtype=torch.int64), 12289)
    with pytest.raises(
        RuntimeError, match=r"x must have shape \[T, D\].*size 4 in dimension 0, but got shape \[3, 2\]"
    ):
        emulated.permute(
            torch.zeros(3, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)
        )
    with pytest.raises(RuntimeError, match=r"top_k must be in \[1, num_experts\] = \[1, 4\], but got 5"):
        emulated.topk_gate(torch.zeros(2, 4), 5, 0, True, None, 1, 1, 1.0)
    with pytest.raises(RuntimeError, match="but got 2"):
        emulated.topk_gate(torch.zeros(2, 4), 1, 2, True, None, 1, 1, 1.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_portable_products_do_not_depend_on_the_batch(emulated, dtype):
    """Promise of batch_invariant() for the portable kernels: a row has the same bits among 1 and among 150."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 72, generator=generator).to(dtype)
    weight, bias = (torch.randn(1, *shape, generator=generator).to(dtype) for shape in ((40, 72), (40,)))

    def product(rows):
        return emulated.grouped_gemm(rows, weight, torch.tensor([len(rows)], dtype=torch.int32), bias)

    whole = product(x)
    for first, size in ((0, 1), (7, 5), (50, 64), (21, 129)):
        assert torch.equal(product(x[first : first + size]), whole[first : first + size])


@pytest.fixture
def in_the_place_of_cpu(emulated):
    library = torch.library.Library("fmoe_ext", "IMPL")
    for name in emu_build.OPERATORS:
        library.impl(name, getattr(emulated, name).default, "CPU", allow_override=True)
    yield
    del library  # its registrations live as long as it does


@pytest.mark.parametrize("operator", test_fuzz_broken.OPERATORS, ids=lambda operator: operator.__name__)
def test_whatever_is_broken_is_named(in_the_place_of_cpu, operator):
    """But for the values of indices, which kernels check."""
    call = operator(test_fuzz_broken.Draw((3, 2, 4, 5, 6), seed=0))
    for name, fault in call.faults:
        if fault in ("too small", "too large") or (
            name in (*call.indices, "capacity") and fault[0] == "value"
        ):
            continue
        arguments = call.broken(name, fault, position=0)
        names = list(arguments) if fault == "device" or fault[0] == "size" else [name]
        assert_raises(names, lambda arguments=arguments: call.function(*arguments.values()))
