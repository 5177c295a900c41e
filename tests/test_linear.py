import math

import pytest
import torch
import torch.nn.functional as F

from fmoe_ext import FMoELinear, FMoETransformerMLP
from fmoe_ext.testing import assert_close

COUNTS = (3, 0, 5, 1)


def make_linear(dtype, bias=True):
    torch.manual_seed(0)
    linear = FMoELinear(len(COUNTS), 6, 7, bias=bias)
    for param in linear.parameters():
        torch.nn.init.normal_(param)
    return linear.to(dtype)


def run(forward, linear, x, grad_out, dtype):
    params = [param.detach().to(dtype).requires_grad_() for param in (x, *linear.parameters())]
    out = forward(*params)
    return [out, *torch.autograd.grad(out, params, grad_out.to(dtype))]


def one_by_one(x, weight, bias=None):
    parts = x[: sum(COUNTS)].split(COUNTS)
    biases = [None] * len(COUNTS) if bias is None else bias
    outputs = [F.linear(part, w, b) for part, w, b in zip(parts, weight, biases, strict=True)]
    return F.pad(torch.cat(outputs), (0, 0, 0, x.shape[0] - sum(COUNTS)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [9, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matches_linear_by_linear(dtype, num_rows, bias):
    """num_rows 12: three rows that no expert counted are zero and get no gradient."""
    linear = make_linear(dtype, bias)
    x, grad_out = torch.randn(num_rows, 6, dtype=dtype), torch.randn(num_rows, 7, dtype=dtype)

    def ours(x, *params):
        names = [name for name, _ in linear.named_parameters()]
        args = (x, torch.tensor(COUNTS))
        return torch.func.functional_call(linear, dict(zip(names, params, strict=True)), args)

    results = zip(
        ("out", "x", *dict(linear.named_parameters())),
        run(ours, linear, x, grad_out, dtype),
        run(one_by_one, linear, x, grad_out, torch.float64),
        run(one_by_one, linear, x, grad_out, dtype),
        strict=True,
    )
    for name, value, truth, plain in results:
        assert_close(value, truth, plain, name)
        if num_rows > sum(COUNTS) and name in ("out", "x"):
            assert not value[sum(COUNTS) :].any()


def test_counts_of_any_integer_kind():
    linear = make_linear(torch.float32)
    x = torch.randn(9, 6)
    out = linear(x, torch.tensor(COUNTS))
    assert torch.equal(linear(x, torch.tensor(COUNTS, dtype=torch.int32)), out)
    assert torch.equal(linear(x, list(COUNTS)), out)


def test_input_is_cast_to_the_weight():
    linear = make_linear(torch.bfloat16)
    x = torch.randn(9, 6)
    out = linear(x, torch.tensor(COUNTS))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, linear(x.bfloat16(), torch.tensor(COUNTS)))


def test_autocast():
    linear = make_linear(torch.float32)
    x = torch.randn(9, 6)
    with torch.autocast(x.device.type, torch.bfloat16):
        out = linear(x, torch.tensor(COUNTS))
    assert out.dtype == torch.bfloat16
    assert_close(
        out,
        one_by_one(x.double(), linear.weight.double(), linear.bias.double()),
        one_by_one(x.bfloat16(), linear.weight.bfloat16(), linear.bias.bfloat16()),
    )


def test_initialisation():
    """Each expert as nn.Linear: weight and bias uniform up to 1 / sqrt(in_feat)."""
    torch.manual_seed(0)
    linear = FMoELinear(4, 50, 80)
    bound = 1 / math.sqrt(50)
    for e in range(4):
        weight = linear.weight[e]
        assert 0.98 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
        assert 0.8 * bound < linear.bias[e].abs().max() <= bound
        assert not torch.equal(weight, linear.weight[e - 1])
    assert str(linear) == "FMoELinear(num_expert=4, in_features=50, out_features=80, bias=True)"
    assert FMoELinear(4, 5, 6, bias=False).bias is None


def test_ranks_draw_what_one_process_draws():
    def drawn(num_expert, rank):
        torch.manual_seed(3)
        linears = FMoELinear(num_expert, 6, 7, rank=rank), FMoELinear(num_expert, 6, 7, False, rank=rank)
        return [p for linear in linears for p in linear.parameters()], torch.rand(())

    whole, after = drawn(4, 0)
    assert not torch.equal(whole[0], whole[2])
    for rank, (parts, then) in enumerate(drawn(2, rank) for rank in range(2)):
        for part, full in zip(parts, whole, strict=True):
            assert torch.equal(part, full[2 * rank : 2 * rank + 2])
        assert then == after, "other parameters would differ from layout to layout"


@pytest.mark.cpu("numbers are drawn on it")
def test_reset_on_the_meta_device_and_after_it():
    with torch.device("meta"):
        linear = FMoELinear(3, 6, 7)
    linear.to_empty(device="cpu").reset_parameters()
    assert linear.weight.abs().max() <= 6**-0.5 and linear.weight.std() > 0.2


def test_output_of_the_quick_start_is_that_of_an_mlp():
    """FMoETransformerMLP(8, 512, 1024, "swiglu", top_k=2): two experts, each as strong as the MLP of nn.Linear."""
    torch.manual_seed(0)
    x = torch.randn(256, 512)
    moe = FMoETransformerMLP(8, 512, 1024, "swiglu", top_k=2)
    up, down = torch.nn.Linear(512, 2048), torch.nn.Linear(1024, 512)
    gate, value = up(x).chunk(2, -1)
    dense = down(F.silu(gate) * value).std().item()
    one_each = moe.experts(x, [32] * 8)
    for rows in one_each.split(32):
        assert rows.std().item() == pytest.approx(dense, rel=0.08)
    assert 0.6 * dense < moe(x).std().item() < dense  # a weighted mean of two that know nothing of each other


@pytest.mark.bad_indices
def test_rejects():
    linear = make_linear(torch.float32)
    with pytest.raises(ValueError, match=r"fwd_expert_count must have shape \[4\], but got \[3\]"):
        linear(torch.randn(9, 6), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="num_expert must be at least 1, but got 0"):
        FMoELinear(0, 6, 7)
