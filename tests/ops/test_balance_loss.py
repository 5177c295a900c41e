"""The balance loss as one operator, against plain PyTorch."""

import pytest
import torch

from fmoe_ext.ops import balance_loss, balance_loss_ref

SCORES = ("softmax", "sigmoid")


def inputs(num_tokens, num_experts, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    logits = 3 * torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)
    return logits, torch.randint(0, 9, (num_experts,), generator=generator)


def loss_and_gradient(function, logits, counts, score):
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, counts, score)
    (3 * loss).backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(0, 3), (1, 1), (5, 17), (600, 8), (300, 65)])
def test_loss_and_gradient_equal_pytorch(isa, num_tokens, num_experts, dtype, tolerance, score):
    logits, counts = inputs(num_tokens, num_experts, dtype)
    loss, grad = loss_and_gradient(balance_loss, logits, counts, score)
    expected, expected_grad = loss_and_gradient(balance_loss_ref, logits.double(), counts, score)
    assert loss.dtype == dtype and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    scale = expected_grad.abs().max() if grad.numel() else 0
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0, atol=4 * tolerance * float(scale))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("shift", [0.0, -60.0, -1e4, 90.0])
def test_large_logits_give_numbers(isa, score, shift):
    logits, counts = inputs(20, 6, torch.float32)
    loss, grad = loss_and_gradient(balance_loss, logits + shift, counts, score)
    expected, expected_grad = loss_and_gradient(balance_loss_ref, (logits + shift).double(), counts, score)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-3, atol=1e-6)


def test_threads_change_no_bit():
    logits, counts = inputs(2000, 24, torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = loss_and_gradient(balance_loss, logits, counts, "softmax")
        torch.set_num_threads(2)
        two = loss_and_gradient(balance_loss, logits, counts, "softmax")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


def test_loss_is_nan_where_a_token_is_not_a_number():
    logits, counts = inputs(9, 4, torch.float32)
    logits[3, 1] = torch.nan
    loss, grad = loss_and_gradient(balance_loss, logits, counts, "softmax")
    assert loss.isnan() and grad[3].isnan().all() and grad[4].isfinite().all()


def test_equal_use_costs_one_and_no_choices_nothing():
    logits = torch.zeros(8, 4)
    assert balance_loss(logits, torch.full((4,), 5)) == 1
    assert balance_loss(logits, torch.zeros(4, dtype=torch.int64)) == 0
    collapsed = torch.tensor([100.0, 0.0, 0.0, 0.0]).expand(8, 4)
    assert balance_loss(collapsed, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4)


@pytest.mark.parametrize("score", SCORES)
def test_gradients_of_gradients(score):
    logits, counts = inputs(4, 5)
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: balance_loss(x, counts, score), logits)
    torch.autograd.gradgradcheck(lambda x: balance_loss(x, counts, score), logits)


@pytest.mark.cpu("on a GPU it is plain PyTorch")
def test_opcheck():
    logits, counts = inputs(4, 5, torch.float32)
    torch.library.opcheck(torch.ops.fmoe_ext.balance_loss.default, (logits.requires_grad_(), counts, 0))
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.fmoe_ext.balance_loss_backward.default, (torch.ones(()), logits.detach(), counts, 1)
        )


@pytest.mark.cpu("on a GPU it is plain PyTorch, which has forward mode")
def test_transforms_of_torch_func():
    logits, counts = inputs(4, 5)
    _, expected = loss_and_gradient(balance_loss_ref, logits, counts, "softmax")
    torch.testing.assert_close(3 * torch.func.grad(balance_loss)(logits, counts), expected)
    with pytest.raises(NotImplementedError, match="balance_loss has no forward-mode derivative"):
        torch.func.jvp(lambda x: balance_loss(x, counts), (logits,), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_take_pytorch(dtype):
    logits, counts = inputs(4, 5, torch.float32)
    loss = balance_loss(logits.to(dtype), counts)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss, balance_loss_ref(logits.to(dtype), counts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": torch.ones(4, dtype=torch.int64)}, r"counts must have shape \[E\] with size 5"),
        ({"counts": torch.ones(5)}, "counts must be int64, but got (Float|torch.float32)"),
        ({"counts": torch.ones(5, 1, dtype=torch.int64)}, r"counts must have shape \[E\]"),
        ({"logits": torch.ones(5)}, r"logits must have shape \[T, E\]"),
        ({"score": "tanh"}, 'score must be "softmax" or "sigmoid", but got "tanh"'),
    ],
)
def test_bad_arguments(change, message):
    logits, counts = inputs(4, 5, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):  # the operator, and plain PyTorch as on a GPU
        arguments = {"logits": logits, "counts": counts, **change}
        arguments["logits"] = arguments["logits"].to(dtype)
        with pytest.raises(RuntimeError, match=message):
            balance_loss(**arguments)
