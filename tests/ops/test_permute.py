import pytest
import torch

from fmoe_ext.ops import permute, permute_ref, sort_tokens, unpermute, unpermute_ref
from fmoe_ext.testing import assert_close, devices

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex128]
# D: nothing, odd tails of the vector loops, and (with many rows) outputs large enough to be streamed
SHAPES = [
    (0, 2, 3, 8),
    (1, 1, 1, 1),
    (3, 0, 2, 4),
    (33, 4, 7, 0),
    (33, 4, 7, 77),
    (1_000, 8, 64, 192),
    (2_000, 8, 16, 193),
]


def routing(T, K, E, device=None, lowest=-1):
    sort = sort_tokens(torch.randint(lowest, E, (T, K), device=device), E)
    return sort.row_idx, sort.inverse


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
@pytest.mark.parametrize(("T", "K", "E", "D"), SHAPES)
def test_permute(T, K, E, D, dtype, device):
    index = routing(T, K, E, device)
    x = (100 * torch.randn(T, D, device=device)).to(dtype)
    expected = permute_ref(x, *index)
    assert torch.equal(permute(x, *index), expected)
    assert torch.equal(permute(x.t().contiguous().t(), *index), expected)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("T", "K", "E", "D"), SHAPES)
@pytest.mark.parametrize("weights", ["none", "float32", "same"])
def test_unpermute(T, K, E, D, dtype, weights, device):
    check_unpermute(T, K, E, D, dtype, weights, device)


@pytest.mark.parametrize("dtype", FLOATS)
def test_unpermute_on_every_instruction_set(isa, dtype):
    check_unpermute(2_000, 8, 16, 193, dtype, "float32")


def check_unpermute(T, K, E, D, dtype, weights, device=None):
    """unpermute and its gradients against float64; none errs more than plain PyTorch does."""
    index = routing(T, K, E, device)
    y = torch.randn(T * K, D, device=device).to(dtype)
    w = (
        None
        if weights == "none"
        else torch.randn(T, K, device=device).to(dtype if weights == "same" else torch.float32)
    )
    inputs = [t.clone().requires_grad_() for t in (y, w) if t is not None]
    plain_inputs = [t.clone().requires_grad_() for t in (y, w) if t is not None]
    true_inputs = [t.double().requires_grad_() for t in (y, w) if t is not None]
    grad = torch.randn(T, D, device=device).to(dtype)

    def run(function, y, w=None):
        out = function(y, *index, w)
        return out, torch.autograd.grad(out, [t for t in (y, w) if t is not None], grad.to(out.dtype))

    out, grads = run(unpermute, *inputs)
    plain, plain_grads = run(unpermute_ref, *plain_inputs)
    truth, true_grads = run(unpermute_ref, *true_inputs)
    if dtype == torch.float64:  # plain PyTorch is the truth, so its error says nothing
        for ours, expected in zip((out, *grads), (truth, *true_grads), strict=True):
            rtol = 1e-12 if ours.dtype == torch.float64 else 1e-7
            torch.testing.assert_close(ours.double(), expected, rtol=rtol, atol=1e-13)
        return
    assert_close(out, truth, plain, "out")
    for name, ours, plain, truth in zip(
        ("grad_y", "grad_weights"), grads, plain_grads, true_grads, strict=False
    ):
        assert_close(ours, truth, plain, name)


@pytest.mark.parametrize("dtype", FLOATS)
def test_round_trip_is_exact(isa, dtype):
    row_idx, inverse = routing(50, 1, 7, lowest=0)
    x = torch.randn(50, 40).to(dtype)
    assert torch.equal(unpermute(permute(x, row_idx, inverse), row_idx, inverse), x)


def test_not_finite_values_stay_in_their_token():
    row_idx, inverse = routing(64, 2, 4, lowest=0)
    y = torch.randn(128, 80, dtype=torch.bfloat16)
    y[5, 70], y[9, 3] = float("nan"), float("inf")
    assert torch.equal(unpermute(y, row_idx, inverse).isnan(), unpermute_ref(y, row_idx, inverse).isnan())
    assert torch.equal(unpermute(y, row_idx, inverse).isinf(), unpermute_ref(y, row_idx, inverse).isinf())


def test_inputs_in_any_layout():
    row_idx, inverse = routing(20, 3, 5)
    y, w = torch.randn(60, 17), torch.randn(1, 3).expand(20, 3)
    expected = unpermute(y, row_idx, inverse, w.contiguous())
    wide_idx = torch.stack([row_idx, row_idx], 1)[:, 1]
    assert torch.equal(unpermute(y.t().contiguous().t(), wide_idx, inverse.t().contiguous().t(), w), expected)
    x = torch.randn(1, 17).expand(20, 17)
    assert torch.equal(permute(x, wide_idx, inverse), permute_ref(x, row_idx, inverse))


def test_fewer_rows_than_choices():
    sort = sort_tokens(torch.tensor([[0, -1], [1, 0], [-1, -1]]), 2)
    rows = sort.row_idx[: sort.offs[-1]]
    x = torch.randn(3, 5)
    y = permute(x, rows, sort.inverse)
    assert torch.equal(y, x[[0, 1, 1]])
    assert torch.equal(unpermute(y, rows, sort.inverse), torch.stack([x[0], 2 * x[1], torch.zeros(5)]))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradcheck(check):
    index = routing(4, 3, 5)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert check(lambda x: permute(x, *index), (x,))
    assert check(lambda y: unpermute(y, *index), (y,))
    assert check(lambda y, w: unpermute(y, *index, w), (y, w))
    assert check(lambda y: unpermute(y, *index, w.detach()), (y,))
    assert check(lambda w: unpermute(y.detach(), *index, w), (w,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_threads(isa, dtype):
    index = routing(3_000, 4, 9)
    x, y = torch.randn(3_000, 130).to(dtype), torch.randn(12_000, 130).to(dtype)
    w, grad = torch.rand(3_000, 4), torch.randn(3_000, 130).to(dtype)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        backward = torch.ops.fmoe_ext.unpermute_backward(grad, y, *index, w)
        results.append((permute(x, *index), unpermute(y, *index, w), *backward))
    torch.set_num_threads(threads)
    assert all(torch.equal(alone, together) for alone, together in zip(*results, strict=True))


@torch.no_grad()
def test_opcheck():
    row_idx, inverse = routing(4, 3, 5)
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(12, 6, requires_grad=True)
    w = torch.rand(4, 3, requires_grad=True)
    ops = torch.ops.fmoe_ext
    torch.library.opcheck(ops.permute.default, (x, row_idx, inverse))
    torch.library.opcheck(ops.unpermute.default, (y, row_idx, inverse, w))
    torch.library.opcheck(ops.unpermute.default, (y, row_idx, inverse, None))
    x, y, w = x.detach(), y.detach(), w.detach()  # backward operators have no autograd of their own
    torch.library.opcheck(ops.unpermute_backward.default, (x, y, row_idx, inverse, w))
    torch.library.opcheck(ops.unpermute_backward.default, (x, None, row_idx, inverse, w))
    torch.library.opcheck(ops.unpermute_backward.default, (x, None, row_idx, inverse, None))


@pytest.mark.bad_indices
@torch.no_grad()
def test_rejects():
    row_idx, inverse = routing(4, 3, 5)
    x, y, w = torch.randn(4, 6), torch.randn(12, 6), torch.rand(4, 3)
    bad_rows, bad_inverse = row_idx.clone(), inverse.clone()
    bad_rows[7], bad_inverse[2, 1] = 12, -3
    with pytest.raises(
        RuntimeError, match=r"row_idx must be in \[-1, T \* K\) = \[-1, 12\), but element 7 is 12"
    ):
        permute(x, bad_rows, inverse)
    with pytest.raises(RuntimeError, match=r"inverse must be in \[-1, R\) = \[-1, 12\), but element 7 is -3"):
        unpermute(y, row_idx, bad_inverse, w)
    with pytest.raises(RuntimeError, match="row_idx must be int32, but got Long"):
        permute(x, row_idx.long(), inverse)
    with pytest.raises(RuntimeError, match=r"inverse must have shape \[T, K\], but got shape \[12\]"):
        permute(x, row_idx, inverse.flatten())
    with pytest.raises(
        RuntimeError, match=r"x must have shape .* size 4 in dimension 0, but got shape \[5, 6\]"
    ):
        permute(torch.randn(5, 6), row_idx, inverse)
    with pytest.raises(
        RuntimeError, match=r"y must have shape .* size 12 in dimension 0, but got shape \[4, 6\]"
    ):
        unpermute(x, row_idx, inverse, w)
    with pytest.raises(RuntimeError, match="y must be float64, float32, bfloat16 or float16, but got Int"):
        unpermute(y.int(), row_idx, inverse)
    with pytest.raises(
        RuntimeError, match=r"topk_weights must be float32 or have the dtype of the rows \(Float\)"
    ):
        unpermute(y, row_idx, inverse, w.double())
    with pytest.raises(
        RuntimeError, match=r"topk_weights must have shape \[T, K\] with size 3 in dimension 1"
    ):
        unpermute(y, row_idx, inverse, w[:, :2])
    with pytest.raises(RuntimeError, match="y is only read for the gradient of topk_weights"):
        torch.ops.fmoe_ext.unpermute_backward(x, y, row_idx, inverse, None)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    T, D = 2**16 + 3, 2**15
    topk_idx = torch.arange(T).unsqueeze(1) % 2
    sort = sort_tokens(topk_idx, 2)
    x = torch.zeros(T, D, dtype=torch.int8)
    x[:, 0] = x[:, -1] = torch.arange(T) % 127
    rows = permute(x, sort.row_idx, sort.inverse)
    del x
    assert torch.equal(rows[:, -1].long(), sort.row_idx.long() % 127)
    assert rows[-1].sum() == 2 * (sort.row_idx[-1] % 127)
    del rows

    y = torch.zeros(T, D, dtype=torch.bfloat16)
    y[:, 0] = y[:, -1] = torch.arange(T) % 127
    few = 64  # a sum over the last rows only: the rows lie past 2^31, the result stays small
    inverse = torch.arange(T - few, T, dtype=torch.int32).unsqueeze(1)
    out = unpermute(y, sort.row_idx, inverse)
    assert torch.equal(out, y[-few:])
