import pytest
import torch
import torch.nn.functional as F

from fmoe_ext.linear import wide_linear

DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float32, torch.float32),
]


def make(inp_dtype, weight_dtype, bias=True):
    generator = torch.Generator().manual_seed(0)
    inp, weight, shift = (torch.randn(shape, generator=generator) for shape in ((50, 24), (7, 24), (7,)))
    leaves = [inp.to(inp_dtype), weight.to(weight_dtype), shift.to(weight_dtype)][: 3 if bias else 2]
    return [t.requires_grad_() for t in leaves]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_equals_linear_of_wide_copies(dtypes, bias):
    leaves = make(*dtypes, bias)
    wide = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
    with torch.autocast(leaves[0].device.type, torch.bfloat16):  # changes nothing
        ours = wide_linear(*leaves)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1)).to(ours)
    our_grads = torch.autograd.grad(ours, leaves, grad)
    plain = F.linear(*(t.to(wide) for t in leaves))
    assert ours.dtype == wide
    for one, other in zip(
        (ours, *our_grads), (plain, *torch.autograd.grad(plain, leaves, grad)), strict=True
    ):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_keeps_no_wide_copy():
    inp, weight, _ = leaves = make(torch.bfloat16, torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        wide_linear(*leaves)
    assert {t.data_ptr() for t in saved} == {inp.data_ptr(), weight.data_ptr()}


def test_second_derivative():
    leaves = [t.detach().double() for t in make(torch.float32, torch.float32)]
    inp = leaves[0][:4, :5].float().requires_grad_()
    weight, bias = leaves[1][:3, :5].requires_grad_(), leaves[2][:3].requires_grad_()
    ours = torch.autograd.grad(wide_linear(inp, weight, bias).square().sum(), inp, create_graph=True)[0]
    plain = torch.autograd.grad(F.linear(inp.double(), weight, bias).square().sum(), inp, create_graph=True)[
        0
    ]
    for leaf in (inp, weight, bias):
        one, other = (
            torch.autograd.grad(t.square().sum(), leaf, retain_graph=True)[0] for t in (ours, plain)
        )
        torch.testing.assert_close(one, other)
