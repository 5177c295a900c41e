"""Zero-bubble schedules: the gradients of the inputs first and of the weights later, each computed once."""

import sys
import weakref

import pytest
import torch
import torch.distributed.pipelining  # products are three nodes where it is loaded
from torch.utils._python_dispatch import TorchDispatchMode

from fmoe_ext.ops import MainGrad, expert_mlp, grouped_gemm
from tests.ops.test_expert_mlp import DTYPES, Problem
from tests.ops.test_grouped_gemm import make_inputs


class Calls(TorchDispatchMode):
    """The names of the operators that are called, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fmoe_ext":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


def mlp(activation="swiglu", combine=True, dtype=torch.float32, shape=(60, 3, 5, 37, 29)):
    """Function of y, inputs, weights and gradient of y of one expert_mlp."""
    problem = Problem(*shape, dtype, activation, combine=combine)
    inputs = [problem.tensors[name] for name in ("x", "topk_weights")]
    weights = [problem.tensors[name] for name in ("w1", "b1", "w2", "b2")]
    return lambda: problem.call(expert_mlp, problem.tensors), inputs, weights, problem.grad


def gemm(transposed=False, dtype=torch.float32):
    x, weight, offs, bias, grad = make_inputs(50, 37, 29, [3, 3, 20, 45], dtype)
    if transposed:
        weight = weight.detach().mT.contiguous().requires_grad_()
    return lambda: grouped_gemm(x, weight, offs, bias, transposed), [x], [weight, bias], grad


def in_two(forward, inputs, weights, grad):
    """As a schedule does it: the same gradient of y twice, first for the inputs and then for the weights."""
    y = forward()
    with Calls() as first:
        of_inputs = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    with Calls() as second:
        of_weights = torch.autograd.grad(y, weights, grad)
    return y, [*of_inputs, *of_weights], first.names, second.names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("shape", [(60, 3, 5, 37, 29), (9000, 1, 2, 96, 64), (0, 2, 3, 4, 5)], ids=str)
def test_expert_mlp_same_bits(shape, activation, combine, dtype):
    if shape[0] == 9000 and (dtype != torch.bfloat16 or not combine):
        pytest.skip("experts that are cut into chunks: once is enough")
    forward, inputs, weights, grad = mlp(activation, combine, dtype, shape)
    y, halves, first, second = in_two(forward, inputs, weights, grad)
    whole = torch.autograd.grad(forward(), [*inputs, *weights], grad)
    for one, other in zip(halves, whole, strict=True):
        assert torch.equal(one, other)
    assert first == ["expert_mlp_backward_inputs"] and second == ["expert_mlp_backward_weights"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set(isa, dtype):
    forward, inputs, weights, grad = mlp(dtype=dtype)
    _, halves, _, _ = in_two(forward, inputs, weights, grad)
    whole = torch.autograd.grad(forward(), [*inputs, *weights], grad)
    assert all(torch.equal(one, other) for one, other in zip(halves, whole, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm(transposed):
    forward, inputs, weights, grad = gemm(transposed)
    _, halves, first, second = in_two(forward, inputs, weights, grad)
    whole = torch.autograd.grad(forward(), [*inputs, *weights], grad)
    assert all(torch.equal(one, other) for one, other in zip(halves, whole, strict=True))
    assert len(first) == 1 and len(second) == 1 + transposed  # transposed: the bias is a product of its own


@pytest.mark.parametrize("make", [mlp, gemm])
def test_whole_backward_is_one_call(make):
    forward, inputs, weights, grad = make()
    y = forward()
    with Calls() as calls:
        torch.autograd.grad(y, [*inputs, *weights], grad)
    assert calls.names == [f"{'expert_mlp' if make is mlp else 'grouped_gemm'}_backward"]


@pytest.mark.parametrize(
    "make", [mlp, gemm, lambda: gemm(transposed=True)], ids=["mlp", "gemm", "transposed"]
)
def test_one_node_without_pipelining(make, monkeypatch):
    forward, inputs, weights, grad = make()
    expected = torch.autograd.grad(forward(), [*inputs, *weights], grad)
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining")
    y = forward()
    nodes = {type(y.grad_fn).__name__} | {type(node).__name__ for node, _ in y.grad_fn.next_functions if node}
    assert "_WholeBackward" in nodes and not nodes & {"_JoinBackward", "_InputsBackward", "_WeightsBackward"}
    got = torch.autograd.grad(y, [*inputs, *weights], grad)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    _, halves, _, _ = in_two(forward, inputs, weights, grad)
    assert all(torch.equal(a, b) for a, b in zip(halves, expected, strict=True))


def test_main_gradients_without_pipelining(monkeypatch):
    """Gradients of the inputs alone add nothing to a main gradient."""
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining")
    x, weight, offs, _, grad = make_inputs(50, 37, 29, [3, 3, 20, 45], torch.float32)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros_like(weight)
    y = grouped_gemm(x, weight, offs, main_grad=MainGrad(weight))
    torch.autograd.grad(y, x, grad, retain_graph=True)
    assert not weight.main_grad.any()
    torch.autograd.backward(y, grad, inputs=[weight])
    (expected,) = torch.autograd.grad(grouped_gemm(x, weight, offs), weight, grad)
    assert torch.equal(weight.main_grad, expected)


def test_other_gradients_of_y_between():
    """Rows kept by one half are not used for another gradient of y."""
    forward, inputs, weights, grad = mlp()
    y, other = forward(), torch.ones_like(grad)
    expected = torch.autograd.grad(forward(), [*inputs, *weights], other)
    torch.autograd.grad(y, inputs, grad, retain_graph=True)
    got = torch.autograd.grad(y, weights, other, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected[2:], strict=True))
    got = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    got = torch.autograd.grad(y, [*inputs, *weights], other)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, inputs, other)


def test_split_backward_leaves_no_memory():
    """The graph holds no circle: with y goes what the halves left."""
    forward, inputs, weights, grad = mlp()
    y = forward()
    dx, _ = torch.autograd.grad(y, inputs, grad, retain_graph=True)
    grad_y = weakref.ref(grad)
    alone = grad.clone()
    watched = weakref.ref(alone)
    torch.autograd.grad(y, inputs, alone, retain_graph=True)
    del alone
    assert watched() is not None  # kept for the weights
    torch.autograd.grad(y, weights, watched())
    assert watched() is None and grad_y() is grad


def test_main_gradients():
    forward, inputs, weights, grad = mlp(dtype=torch.bfloat16)
    whole = torch.autograd.grad(forward(), [*inputs, *weights], grad)
    problem = Problem(60, 3, 5, 37, 29, torch.bfloat16, "swiglu")
    w1, w2 = (torch.nn.Parameter(problem.tensors[name].detach()) for name in ("w1", "w2"))
    for w in (w1, w2):
        w.main_grad = torch.zeros(w.shape)
    tensors = {**problem.tensors, "w1": w1, "w2": w2}
    mains = (MainGrad(w1), MainGrad(w2))
    y = problem.call(lambda *arguments: expert_mlp(*arguments, mains), tensors)
    others = [tensors[name] for name in ("x", "topk_weights")]
    dx = torch.autograd.grad(y, others, grad, retain_graph=True)
    assert not w1.main_grad.any() and not w2.main_grad.any()
    torch.autograd.backward(y, grad, inputs=[w1, tensors["b1"], w2, tensors["b2"]])
    assert all(torch.equal(a, b) for a, b in zip(dx, whole[:2], strict=True))
    assert torch.equal(w1.main_grad.bfloat16(), whole[2]) and torch.equal(w2.main_grad.bfloat16(), whole[4])
    assert w1.grad is None and torch.equal(tensors["b1"].grad, whole[3])


@pytest.mark.parametrize("make", [mlp, gemm])
def test_second_derivatives_raise(make):
    forward, inputs, weights, grad = make()
    for wanted in (inputs, weights[:1], [*inputs, *weights]):
        grads = torch.autograd.grad(forward(), wanted, grad, create_graph=True)
        with pytest.raises(
            RuntimeError, match=r"second derivatives are not implemented|does not require grad"
        ):
            torch.autograd.grad(sum(g.square().sum() for g in grads), [*inputs, *weights])


@pytest.mark.parametrize(
    "needs", [[True] * 6, pytest.param([True, False, True, False, True, False], marks=pytest.mark.long)]
)
@torch.no_grad()
def test_opcheck_of_the_halves(needs):
    problem = Problem(6, 2, 3, 5, 12, torch.float32)  # dh: two cache lines a row, of three
    x, w1, b1, w2, b2, topk_weights = (t.detach() for t in problem.tensors.values())
    native, indices = torch.ops.fmoe_ext, (problem.row_idx, problem.inverse, problem.offs)
    h = native.expert_mlp(x, *indices, w1, b1, w2, b2, topk_weights, 4, True, True)[1]
    arguments = (problem.grad, x, *indices, w1, w2, b2, topk_weights, h, 4, True, needs)
    torch.library.opcheck(native.expert_mlp_backward_inputs.default, arguments)
    kept = native.expert_mlp_backward_inputs(*arguments)[2:]
    arguments = (problem.grad, x, *indices, w1, w2, topk_weights, *kept, 4, True, needs)
    mains = torch.zeros_like(w1), torch.zeros_like(w2)
    torch.library.opcheck(native.expert_mlp_backward_weights.default, (*arguments, None, None))
    torch.library.opcheck(native.expert_mlp_backward_weights.default, (*arguments, *mains))
