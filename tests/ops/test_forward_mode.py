"""Forward-mode differentiation is refused by every differentiable operator; silence would be a derivative of zero."""

import pytest
import torch
from torch.autograd import forward_ad

from fmoe_ext import ops

pytestmark = pytest.mark.cpu("its tensors are made before the device is chosen")

RAW = torch.ops.fmoe_ext
OFFS, ROW_IDX = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
INVERSE, TOPK_IDX = torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int64)
W1, W2, ONES = torch.ones(2, 3, 4), torch.ones(2, 4, 3), torch.ones(2, 4)
LEARNT = W1.clone().requires_grad_()
ROWS = ROW_IDX, INVERSE, OFFS
CALLS = {
    "permute": lambda x: ops.permute(x, ROW_IDX, INVERSE),
    "unpermute": lambda x: ops.unpermute(x, ROW_IDX, INVERSE, None),
    "topk_gate": lambda x: ops.topk_gate(x, 1)[1],
    "topk_gate_again": lambda x: ops.topk_gate_again(x, TOPK_IDX)[1],
    "grouped_gemm": lambda x: ops.grouped_gemm(x, W1, OFFS),
    "grouped_gemm transposed": lambda x: ops.grouped_gemm(x, W2, OFFS, transposed=True),
    "grouped_gemm in two": lambda x: ops.grouped_gemm(x, LEARNT, OFFS),
    "clamped_glu": lambda x: ops.clamped_glu(x),
    "expert_mlp": lambda x: ops.expert_mlp(x, *ROWS, W1, None, W2, None),
    "expert_mlp in two": lambda x: ops.expert_mlp(x, *ROWS, LEARNT, None, W2, None),
}
H, WEIGHTS, B1, B2 = torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3), torch.ones(2, 4)
RAW_CALLS = {
    "permute": (ONES, ROW_IDX, INVERSE),
    "unpermute": (ONES, ROW_IDX, INVERSE, WEIGHTS),
    "topk_gate": (ONES, 1),
    "grouped_gemm": (ONES, W1, OFFS, B1),
    "expert_mlp": (ONES, *ROWS, W1, B1, W2, B2, WEIGHTS, 0, True, False),
}


def assert_refused(name, call, x):
    text = f"{name.split()[0]} has no forward-mode derivative"
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
            dual = forward_ad.make_dual(x.clone().requires_grad_(requires_grad), torch.ones_like(x))
            call(dual)
    # an autograd.Function of ours is refused by PyTorch
    with pytest.raises(RuntimeError, match=f"{text}|autograd.Function with functorch transforms"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    x = torch.randn(2, 4)
    assert_refused(name, CALLS[name], x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.equal(CALLS[name](x), CALLS[name](dual.detach().clone()))


@pytest.mark.parametrize("name", RAW_CALLS)
def test_raw_operators_refuse_every_argument(name):
    args, op = RAW_CALLS[name], getattr(RAW, name)
    op(*args)
    for place, t in enumerate(args):
        if isinstance(t, torch.Tensor) and t.is_floating_point():
            assert_refused(name, lambda x, place=place: op(*args[:place], x, *args[place + 1 :]), t)


def test_jacobians_and_tangents_of_gradients():
    x = torch.randn(2, 4)
    with pytest.raises(NotImplementedError, match="permute has no forward-mode derivative"):
        torch.func.jacfwd(lambda x: RAW.permute(x, ROW_IDX, INVERSE))(x)


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("unpermute", lambda x: RAW.unpermute(x, ROW_IDX, INVERSE, WEIGHTS)),
        ("topk_gate", lambda x: ops.topk_gate(x, 1)[1]),
        ("topk_gate", lambda x: RAW.topk_gate(x, 1)[1]),
        ("grouped_gemm", lambda x: RAW.grouped_gemm(x, W1, OFFS)),
        ("grouped_gemm", lambda x: ops.grouped_gemm(x, LEARNT, OFFS)),
        ("expert_mlp", lambda x: ops.expert_mlp(x, *ROWS, LEARNT, None, W2, None)),
        ("expert_mlp", lambda x: ops.expert_mlp(x, *ROWS, W1, None, W2, None)),
    ],
    ids=[
        "unpermute",
        "topk_gate",
        "raw topk_gate",
        "raw grouped_gemm",
        "grouped_gemm",
        "expert_mlp",
        "frozen",
    ],
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_backward_refuses_a_tangent_of_the_gradient(name, forward, create_graph):
    x = torch.randn(2, 4).requires_grad_()
    y = forward(x)
    text = rf"{name}_backward(_inputs)? has no forward"  # _inputs where pipelining is loaded
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
        dual = forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y))
        torch.autograd.grad(y, x, dual, create_graph=create_graph)
