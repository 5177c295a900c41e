import pytest
import torch

from fmoe_ext.ops import topk_gate, topk_gate_again, topk_gate_ref
from fmoe_ext.testing import assert_close, devices

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# E: below, at and beyond one vector, one vector of maxima (256) and the vector code's limit (4096)
SHAPES = [
    (0, 4, 2),
    (1, 1, 1),
    (40, 5, 5),
    (40, 16, 2),
    (300, 64, 8),
    (70, 200, 200),
    (70, 256, 8),
    (70, 300, 6),
    (9, 5000, 9),
]
SCORES = [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)]
INF, NAN = float("inf"), float("nan")


def forward_backward(function, logits, grad, *args, **kwargs):
    logits = logits.clone().requires_grad_()
    topk_idx, weights = function(logits, *args, **kwargs)
    (grad_logits,) = torch.autograd.grad(weights, logits, grad.to(weights.dtype))
    return topk_idx, weights.detach(), grad_logits


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("score", "normalize"), SCORES)
@pytest.mark.parametrize(("T", "E", "K"), SHAPES)
def test_topk_gate(T, E, K, score, normalize, dtype, device):
    logits = (3 * torch.randn(T, E, device=device)).to(dtype)  # in 16 bits, many of them are equal
    grad = torch.randn(T, K, device=device).to(dtype)
    args = (K, score, normalize, None, 1, 1, 2.5)
    topk_idx, weights, grad_logits = forward_backward(topk_gate, logits, grad, *args)
    plain_idx, plain, plain_grad = forward_backward(topk_gate_ref, logits, grad, *args)
    _, truth, true_grad = forward_backward(topk_gate_ref, logits.double(), grad, *args)
    assert topk_idx.dtype == torch.int64
    assert torch.equal(topk_idx, plain_idx)
    if dtype == torch.float64:  # plain PyTorch is the truth, so its error says nothing
        torch.testing.assert_close(weights, truth, rtol=1e-13, atol=0)
        torch.testing.assert_close(grad_logits, true_grad, rtol=1e-12, atol=1e-14)
        return
    assert_close(weights, truth, plain, "weights")
    assert_close(grad_logits, true_grad, plain_grad, "grad_logits")


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (8, 3), (8, 8), (64, 9)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("score", "normalize"), SCORES)
def test_groups_and_bias(score, normalize, biased, num_groups, topk_groups, device):
    logits = torch.randn(200, 64, dtype=torch.float64, device=device)
    bias = 0.3 * torch.randn(64, dtype=torch.float64, device=device) if biased else None
    args = (8, score, normalize, bias, num_groups, topk_groups)
    topk_idx, weights = topk_gate(logits, *args)
    expected_idx, expected = topk_gate_ref(logits, *args)
    assert torch.equal(topk_idx, expected_idx)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0)

    float_bias = None if bias is None else bias.float()
    topk_idx, weights = topk_gate(logits.float(), 8, score, normalize, float_bias, num_groups, topk_groups)
    expected_idx, expected = topk_gate_ref(
        logits.float(), 8, score, normalize, float_bias, num_groups, topk_groups
    )
    same = (topk_idx == expected_idx).all(1)  # float32 scores may round to another order, though hardly ever
    assert same.float().mean() > 0.98
    torch.testing.assert_close(weights[same], expected[same], rtol=2e-6, atol=0)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("E", [7, 64, 300, 5000])
def test_ties_lower_index_first(E, device):
    equal = torch.zeros(3, E, device=device)
    equal[1] = -INF
    equal[2, ::2] = -0.0
    assert torch.equal(topk_gate(equal, 5)[0], torch.arange(5, device=device).expand(3, 5))
    few_values = torch.randint(-2, 3, (100, E), device=device).float()
    for kwargs in ({}, {"score": "sigmoid"}, {"score": "sigmoid", "bias": torch.zeros(E, device=device)}):
        topk_idx, _ = topk_gate(few_values, 5, **kwargs)
        assert torch.equal(topk_idx, topk_gate_ref(few_values, 5)[0])


def test_equal_groups_lower_index_first():
    logits = torch.zeros(2, 12)
    for bias in (None, torch.zeros(12)):
        assert topk_gate(logits, 4, bias=bias, num_groups=4, topk_groups=2)[0].tolist() == [[0, 1, 2, 3]] * 2
    logits[:, 7] = 1.0
    assert topk_gate(logits, 4, num_groups=4, topk_groups=2)[0].tolist() == [[7, 0, 1, 2]] * 2


def test_group_rank():
    """A softmax group ranks by its best logit, a sigmoid group by its two best scores."""
    logits = torch.tensor([[4.0, -9.0, 3.0, 3.0]])
    assert topk_gate(logits, 1, "softmax", num_groups=2, topk_groups=1)[0].item() == 0
    assert topk_gate(logits, 1, "sigmoid", num_groups=2, topk_groups=1)[0].item() == 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("E", [6, 40, 5000])
def test_not_finite(E, dtype):
    logits = torch.randn(5, E).to(dtype)
    logits[0, 3] = NAN
    logits[1, 2] = logits[1, 4] = -NAN
    logits[2, 1], logits[2, 5] = INF, NAN
    logits[3, 1] = INF
    logits[4] = -INF
    logits[4, 2] = 1.0
    for score in ("softmax", "sigmoid"):
        topk_idx, weights = topk_gate(logits, 3, score)
        assert (
            topk_idx[0, 0] == 3 and topk_idx[1, :2].tolist() == [2, 4] and topk_idx[2, :2].tolist() == [5, 1]
        )
        assert topk_idx[3, 0] == 1 and topk_idx[4].tolist() == [2, 0, 1]
        assert weights[:3].isnan().all()
        assert weights[4].tolist() == [1, 0, 0]
        expected = topk_gate_ref(logits, 3, score, False)[1]
        torch.testing.assert_close(topk_gate(logits, 3, score, False)[1], expected, equal_nan=True)
    assert topk_gate(logits, 3, "softmax")[1][3].isnan().all()
    assert topk_gate(logits, 3, "softmax", bias=torch.arange(E) * -1.0)[1][:4].isnan().all()


@pytest.mark.parametrize(("score", "normalize"), SCORES)
def test_extreme_logits(score, normalize):
    """No overflow, no underflow to 0 / 0, in values and gradients."""
    logits = torch.tensor(
        [[-300.0, -301.0, -500.0], [300.0, 299.0, -300.0], [-60.0, -61.0, -90.0], [88.0, -88.0, 0.0]]
    )
    args = (2, score, normalize)
    grad = torch.tensor([[1.0, -2.0]]).expand(4, 2)
    _, weights, grad_logits = forward_backward(topk_gate, logits, grad, *args)
    _, expected, expected_grad = forward_backward(topk_gate_ref, logits.double(), grad, *args)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-6, atol=1e-37)
    torch.testing.assert_close(grad_logits.double(), expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize(("score", "normalize"), SCORES)
def test_gradcheck(score, normalize, check):
    logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64)
    assert check(lambda x: topk_gate(x, 3, score, normalize, bias, scale=2.5)[1], (logits,))


def test_zero_scale():
    logits, grad = torch.randn(3, 7), torch.randn(3, 2)
    for score, normalize in SCORES:
        _, weights, grad_logits = forward_backward(topk_gate, logits, grad, 2, score, normalize, scale=0.0)
        assert not weights.any() and not grad_logits.any()


def test_inputs_in_any_layout():
    logits = torch.randn(12, 20)
    expected = topk_gate(logits, 3)
    assert all(map(torch.equal, topk_gate(logits.t().contiguous().t(), 3), expected))
    row, bias = torch.randn(1, 20).expand(12, 20), torch.randn(1).expand(20)
    assert all(
        map(torch.equal, topk_gate(row, 3, bias=bias), topk_gate(row.contiguous(), 3, bias=bias.contiguous()))
    )


@pytest.mark.parametrize(("score", "normalize"), SCORES)
def test_threads(score, normalize):
    logits, grad = torch.randn(3_000, 64), torch.randn(3_000, 4)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(forward_backward(topk_gate, logits, grad, 4, score, normalize))
    torch.set_num_threads(threads)
    assert all(torch.equal(alone, together) for alone, together in zip(*results, strict=True))


def test_autocast_leaves_the_dtype_alone():
    logits = torch.randn(5, 8)
    with torch.autocast(logits.device.type, torch.bfloat16):
        topk_idx, weights = topk_gate(logits, 2)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, topk_gate(logits, 2)[1]) and torch.equal(topk_idx, logits.topk(2).indices)


@torch.no_grad()
def test_opcheck():
    logits = torch.randn(4, 8, requires_grad=True)
    ops = torch.ops.fmoe_ext
    for arguments in ((2,), (2, 1, False, torch.randn(8), 4, 2, 2.5)):
        torch.library.opcheck(ops.topk_gate.default, (logits.detach(), *arguments))
        # opcheck's test_aot_dispatch_dynamic cannot add up gradients when the first result has integers
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.topk_gate.default, (logits, *arguments), test_utils=utils)
    topk_idx, weights = (t.detach() for t in topk_gate(logits, 2))
    arguments = (torch.randn(4, 2), logits.detach(), topk_idx, weights, 0, True, 1.0)
    torch.library.opcheck(ops.topk_gate_backward.default, arguments)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    T, E = 2**16 + 3, 2**15
    logits = torch.zeros(T, E, dtype=torch.bfloat16)
    favourite = E - 1 - torch.arange(T) % 1000
    logits[torch.arange(T), favourite] = 40
    logits.requires_grad_()
    topk_idx, weights = topk_gate(logits, 2)
    assert torch.equal(topk_idx[:, 0], favourite) and not topk_idx[:, 1].any()
    (grad,) = torch.autograd.grad(weights, logits, torch.tensor([1.0, 0]).bfloat16().expand(T, 2))
    assert grad[-1, favourite[-1]].item() == pytest.approx(0, abs=1e-2)
    assert torch.equal(grad[-1].isfinite().sum(), torch.tensor(E))


def test_compiled():
    logits, grad = torch.randn(6, 8), torch.randn(6, 2)
    compiled = torch.compile(topk_gate, backend="aot_eager", fullgraph=True)
    results = [forward_backward(function, logits, grad, 2, "sigmoid") for function in (topk_gate, compiled)]
    assert all(map(torch.equal, *results))


def test_rejects():
    logits = torch.randn(4, 8)
    for top_k in (0, -1, 9):
        with pytest.raises(
            RuntimeError, match=rf"top_k must be in \[1, num_experts\] = \[1, 8\], but got {top_k}"
        ):
            topk_gate(logits, top_k)
    with pytest.raises(RuntimeError, match='score must be "softmax" or "sigmoid", but got "relu"'):
        topk_gate(logits, 2, "relu")
    with pytest.raises(RuntimeError, match="num_groups must divide the 8 experts, but got 3"):
        topk_gate(logits, 2, num_groups=3)
    with pytest.raises(RuntimeError, match=r"topk_groups must be in \[1, num_groups\] = \[1, 4\], but got 5"):
        topk_gate(logits, 2, num_groups=4, topk_groups=5)
    with pytest.raises(RuntimeError, match="top_k must be at most the 2 experts of 1 groups, but got 3"):
        topk_gate(logits, 3, num_groups=4, topk_groups=1)
    with pytest.raises(
        RuntimeError, match=r"bias must have shape \[E\] with size 8 in dimension 0, but got shape \[7\]"
    ):
        topk_gate(logits, 2, bias=torch.zeros(7))
    with pytest.raises(RuntimeError, match=r"logits must have shape \[T, E\], but got shape \[8\]"):
        topk_gate(logits[0], 2)
    with pytest.raises(
        RuntimeError, match="logits must be float64, float32, bfloat16 or float16, but got Int"
    ):
        topk_gate(logits.int(), 2)


@pytest.mark.cpu(
    "on a GPU an index out of range counts as dropped; FMOE_DEBUG=1 is about the functions of ops"
)
@torch.no_grad()
def test_backward_rejects_a_choice_out_of_range():
    logits = torch.randn(4, 8)
    topk_idx, weights = topk_gate(logits, 2)
    topk_idx[1, 0] = 8
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[0, 8\), but element 2 is 8"):
        torch.ops.fmoe_ext.topk_gate_backward(weights, logits, topk_idx, weights, 0, True, 1.0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_again_has_the_weights_of_the_same_choices_to_the_bit(isa, score, normalize):
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    topk_idx, expected = topk_gate(logits, 3, score, normalize, scale=1.5)
    weight = torch.randn(50, 3)
    grad = torch.autograd.grad((expected * weight).sum(), logits)[0]
    again, weights = topk_gate_again(logits, topk_idx, score, normalize, scale=1.5)
    assert torch.equal(again, topk_idx)
    assert torch.equal(weights, expected)
    assert torch.equal(torch.autograd.grad((weights * weight).sum(), logits)[0], grad)


def test_again_with_choices_that_the_logits_do_not_prefer():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    topk_idx = torch.tensor([[0, 5], [1, 2], [3, 0], [4, 1], [2, 5]])
    weights = topk_gate_again(logits, topk_idx)[1]
    expected = logits.gather(1, topk_idx).softmax(1)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(w[:, 0].square().sum(), logits)[0] for w in (weights, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
