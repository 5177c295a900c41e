import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fmoe_ext.ops import expert_mlp, expert_mlp_ref
from fmoe_ext.ops.activations import ACTIVATIONS, GATED_ACTIVATIONS, activation_number
from fmoe_ext.ops.arguments import (
    ExpertMlp,
    ExpertMlpBackward,
    ExpertMlpBackwardWeights,
    FrozenMlp,
    FrozenMlpBackward,
)
from fmoe_ext.testing import assert_close

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SWIGLU = activation_number("swiglu")
NAMES = ("x", "w1", "b1", "w2", "b2", "topk_weights")


def sort_choices(topk_idx, num_experts):
    """row_idx, inverse, offs of choices of which some are dropped (-1), by plain sorting."""
    flat = topk_idx.flatten()
    order = torch.where(flat < 0, num_experts, flat).argsort(stable=True)
    kept = int((flat >= 0).sum())
    row_idx = order.int()
    row_idx[kept:] = -1
    inverse = torch.full_like(row_idx, -1)
    inverse[order[:kept]] = torch.arange(kept, dtype=torch.int32)
    offs = torch.bincount(flat[flat >= 0], minlength=num_experts).cumsum(0).int()
    return row_idx, inverse.view_as(topk_idx), offs


class Problem:
    """Inputs for one call, and what it gives by a function that has the signature of expert_mlp."""

    def __init__(
        self,
        T,
        K,
        E,
        D,
        H,
        dtype,
        activation="swiglu",
        bias=True,
        weights=True,
        combine=True,
        topk_idx=None,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(T * 31 + D + 10_000 * seed)

        def random(*shape, scale=1.0):
            return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

        if topk_idx is None:
            topk_idx = torch.randint(-1, E, (T, K), generator=generator)
        self.row_idx, self.inverse, self.offs = sort_choices(topk_idx, E)
        width = 2 * H if activation in GATED_ACTIVATIONS else H
        self.tensors = {
            "x": random(T, D),
            "w1": random(E, width, D, scale=D**-0.5),
            "b1": random(E, width) if bias else None,
            "w2": random(E, D, H, scale=H**-0.5),
            "b2": random(E, D) if bias else None,
            "topk_weights": random(T, K) if weights else None,
        }
        self.grad = random(T if combine else T * K, D).detach()
        self.activation, self.combine = activation, combine

    def call(self, function, tensors):
        x, w1, b1, w2, b2, topk_weights = tensors.values()
        indices = (self.row_idx, self.inverse, self.offs)
        return function(x, *indices, w1, b1, w2, b2, topk_weights, self.activation, self.combine)

    def results(self, function, tensors=None):
        tensors = self.tensors if tensors is None else tensors
        y = self.call(function, tensors)
        present = {name: t for name, t in tensors.items() if t is not None}
        return {
            "y": y,
            **dict(
                zip(present, torch.autograd.grad(y, present.values(), self.grad.to(y.dtype)), strict=True)
            ),
        }

    def check(self):
        check_together([self])


def check_together(problems):
    """Ours as exact as plain PyTorch over all of them: how the few numbers of a tiny one are rounded is luck."""

    def results(function, dtype=None):
        each = [
            problem.results(
                function,
                {
                    n: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
                    for n, t in problem.tensors.items()
                },
            )
            for problem in problems
        ]
        return {name: torch.stack([result[name] for result in each]) for name in each[0]}

    truth, plain = results(expert_mlp_ref, torch.float64), results(expert_mlp_ref)
    for name, got in results(expert_mlp).items():
        if got.dtype == torch.float64:
            torch.testing.assert_close(got, truth[name], rtol=1e-11, atol=1e-11)
        else:
            assert_close(got, truth[name], plain[name], name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(isa, dtype, activation):
    Problem(60, 3, 5, 37, 29, dtype, activation).check()
    Problem(60, 2, 3, 32, 48, dtype, activation, bias=False, weights=False, combine=False).check()


CURVES = {  # without the cancellation that torch's GELU has far below zero, also in float64
    "gelu": lambda h: h * torch.erfc(-h / 2**0.5) / 2,
    "gelu_tanh": lambda h: h * torch.sigmoid(1.5957691216057308 * h * (1 + 0.044715 * h * h)),
    "silu": F.silu,
}


@pytest.mark.cpu(
    "products with denormal numbers are as fast as any on a GPU, whose GELU is as exact as torch's"
)
@pytest.mark.parametrize("activation", CURVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_activation_and_no_slope_is_denormal(isa, dtype, activation):
    """Products with denormal numbers take many times as long, and diverging weights have most h far from zero."""
    h = torch.cat((torch.linspace(-120, 12, 3968), -torch.logspace(2, 6, 128))).view(-1, 16).to(dtype)
    h.requires_grad_()
    topk_idx = torch.zeros(len(h), 1, dtype=torch.int64)
    same = torch.eye(16, dtype=dtype)[None]  # h = x and y = activation(h)
    y = expert_mlp(h, *sort_choices(topk_idx, 1), same, None, same, None, None, activation)
    (slope,) = torch.autograd.grad(y.sum(), h)
    wide = h.detach().double().requires_grad_()
    truth = CURVES[activation](wide)
    (true_slope,) = torch.autograd.grad(truth.sum(), wide)
    relative = 1e-4 if dtype == torch.float32 else 1e-2
    for ours, expected, near_zero in ((y, truth, 2e-35), (slope, true_slope, relative)):
        size = ours.detach().float().abs()
        assert not ((size > 0) & (size < torch.finfo(torch.float32).tiny)).any()
        torch.testing.assert_close(ours.double(), expected, rtol=relative, atol=near_zero)


@pytest.mark.cpu("a GPU's curves are compared with torch's")
@pytest.mark.parametrize("activation", CURVES)
def test_curves_of_bfloat16_err_by_rounding_alone(isa, activation):
    """All numbers of bfloat16 up to 16 and their slopes, within a tenth of what rounding the result may change."""
    positive = torch.arange(0x3000, 0x4180, dtype=torch.int16).view(torch.bfloat16)
    h = torch.cat((positive, -positive)).view(-1, 16).requires_grad_()
    same = torch.eye(16, dtype=h.dtype)[None]  # h = x and y = activation(h)
    routing = sort_choices(torch.zeros(len(h), 1, dtype=torch.int64), 1)
    y = expert_mlp(h, *routing, same, None, same, None, None, activation)
    (slope,) = torch.autograd.grad(y.sum(), h)
    wide = h.detach().double().requires_grad_()
    truth = CURVES[activation](wide)
    (true_slope,) = torch.autograd.grad(truth.sum(), wide)
    limit = 1.1 * torch.finfo(h.dtype).eps / 2
    torch.testing.assert_close(y.double(), truth, rtol=limit, atol=2e-35)
    torch.testing.assert_close(slope.double(), true_slope, rtol=limit, atol=limit / 10)


SHAPES = ((0, 2, 3, 4, 5), (1, 2, 3, 16, 5), (70, 2, 3, 3, 33), (33, 4, 20, 9, 5), (150, 2, 2, 65, 100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, combine, dtype):
    seeds = range(8 if shape[0] == 1 else 1)
    check_together([Problem(*shape, dtype, combine=combine, seed=seed) for seed in seeds])
    check_together([Problem(*shape, dtype, "gelu", bias=False, combine=combine, seed=seed) for seed in seeds])


def test_no_experts():
    problem = Problem(5, 2, 2, 4, 6, torch.float32, topk_idx=torch.full((5, 2), -1))
    x, w1, b1, w2, b2, weights = problem.tensors.values()
    indices = (problem.row_idx, problem.inverse, problem.offs[:0])
    y = expert_mlp(x, *indices, w1[:0], b1[:0], w2[:0], b2[:0], weights, "swiglu")
    assert y.shape == (5, 4) and not y.any()


@pytest.mark.slow
def test_more_than_two_to_the_31_elements():
    T, D = 2**16 + 3, 2**15
    row_idx, inverse, offs = sort_choices(torch.arange(T).unsqueeze(1) % 2, 2)
    x = torch.zeros(T, D, dtype=torch.bfloat16)
    x[:, 0] = x[:, -1] = torch.arange(T) % 50
    w1, w2 = torch.zeros(2, 1, D, dtype=torch.bfloat16), torch.zeros(2, D, 1, dtype=torch.bfloat16)
    w1[:, 0, 0] = w1[:, 0, -1] = 1
    w2[0, -1] = 1
    w2[1, -1] = 2
    y = expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, activation="relu", combine=False)
    del x
    expected = 2 * (row_idx % 50) * (1 + row_idx % 2)
    assert torch.equal(y[:, -1].long(), expected.long())
    assert not y[-1, :-1].any()


def test_one_expert_gets_all_and_every_choice_dropped():
    Problem(90, 2, 4, 40, 24, torch.bfloat16, topk_idx=torch.full((90, 2), 2)).check()
    problem = Problem(9, 2, 4, 40, 24, torch.float32, topk_idx=torch.full((9, 2), -1))
    assert all(t.count_nonzero() == 0 for t in problem.results(expert_mlp).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_mlp_expert_over_several_chunks(dtype):
    Problem(4000, 1, 2, 8, 3100, dtype, "relu", topk_idx=(torch.arange(4000) % 50 > 0)[:, None].int()).check()


def test_weights_in_float32():
    problem = Problem(60, 3, 5, 40, 32, torch.bfloat16)
    weights = problem.tensors["topk_weights"].detach()
    mixed = {**problem.tensors, "topk_weights": weights.float().requires_grad_()}
    got, expected = problem.results(expert_mlp, mixed), problem.results(expert_mlp)
    assert got["topk_weights"].dtype == torch.float32
    assert torch.equal(got.pop("topk_weights").bfloat16(), expected.pop("topk_weights"))
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


def test_not_contiguous():
    problem = Problem(60, 3, 5, 40, 32, torch.float32)
    expected = problem.results(expert_mlp)
    strided = {name: t.detach().mT.contiguous().mT.requires_grad_() for name, t in problem.tensors.items()}
    problem.grad = problem.grad.mT.contiguous().mT
    problem.inverse = problem.inverse.mT.contiguous().mT
    for name, got in problem.results(expert_mlp, strided).items():
        assert torch.equal(got, expected[name]), name


# (T, K, E, D, H): experts that all threads share, few rows, one expert, and small ones that a thread takes whole
SHAPES_FOR_THREADS = ((400, 3, 5, 100, 80), (1, 2, 4, 300, 500), (500, 1, 1, 64, 64), (400, 2, 24, 64, 64))


@pytest.mark.cpu("its threads")
@pytest.mark.parametrize("shape", SHAPES_FOR_THREADS, ids=str)
def test_bitwise_equal_for_any_number_of_threads(isa, shape):
    problem = Problem(*shape, torch.float32)
    expected = problem.results(expert_mlp)
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            for name, got in problem.results(expert_mlp).items():
                assert torch.equal(got, expected[name]), name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "relu"])
def test_gradients(activation, combine):
    problem = Problem(5, 2, 3, 3, 4, torch.float64, activation, combine=combine)

    def function(*tensors):
        return problem.call(expert_mlp, dict(zip(NAMES, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(problem.tensors.values()))


@pytest.mark.parametrize("wanted", NAMES)
def test_one_gradient_alone(wanted):
    problem = Problem(40, 2, 3, 20, 24, torch.float32)
    expected = problem.results(expert_mlp)[wanted]
    tensors = {name: t.detach().requires_grad_(name == wanted) for name, t in problem.tensors.items()}
    (got,) = torch.autograd.grad(problem.call(expert_mlp, tensors), tensors[wanted], problem.grad)
    assert torch.equal(got, expected)


def test_second_derivative_raises():
    problem = Problem(5, 2, 3, 3, 4, torch.float64)
    y = problem.call(expert_mlp, problem.tensors)
    (dx,) = torch.autograd.grad(y.square().sum(), problem.tensors["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not implemented"):
        dx.sum().backward()


def test_keeps_x_h_and_indices_only():
    problem = Problem(64, 2, 4, 16, 32, torch.float32)
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        problem.call(expert_mlp, problem.tensors)
    parameters = {t.data_ptr() for name, t in problem.tensors.items() if name != "x"}
    kept = sum(t.nbytes for pointer, t in saved.items() if pointer not in parameters)
    indices = problem.row_idx.nbytes + problem.inverse.nbytes + problem.offs.nbytes
    assert kept == problem.tensors["x"].nbytes + 64 * 2 * 2 * 32 * 4 + indices
    detached = {name: t.detach() for name, t in problem.tensors.items()}
    x, w1, b1, w2, b2, weights = detached.values()
    arguments = (
        x,
        problem.row_idx,
        problem.inverse,
        problem.offs,
        w1,
        b1,
        w2,
        b2,
        weights,
        SWIGLU,
        True,
        False,
    )
    y, h = torch.ops.fmoe_ext.expert_mlp(*arguments)
    assert h.numel() == 0 and torch.equal(y, problem.call(expert_mlp, problem.tensors))


@pytest.mark.parametrize("combine", [True, pytest.param(False, marks=pytest.mark.long)])
def test_opcheck(combine):
    problem = Problem(6, 2, 3, 5, 4, torch.float32, combine=combine)
    x, w1, b1, w2, b2, weights = problem.tensors.values()
    indices = (problem.row_idx, problem.inverse, problem.offs)
    op = torch.ops.fmoe_ext.expert_mlp.default
    torch.library.opcheck(op, (x, *indices, w1, b1, w2, b2, weights, SWIGLU, combine, True))
    torch.library.opcheck(
        op, (x.detach(), *indices, w1.detach(), None, w2.detach(), None, None, SWIGLU, combine, False)
    )
    x, w1, b1, w2, b2, weights = (t.detach() for t in problem.tensors.values())
    h = op(x, *indices, w1, b1, w2, b2, weights, SWIGLU, combine, True)[1]
    arguments = (problem.grad, x, *indices, w1, w2, b2, weights, h, SWIGLU, combine)
    backward = torch.ops.fmoe_ext.expert_mlp_backward.default
    with torch.no_grad():
        torch.library.opcheck(backward, (*arguments, [True] * 6))
        torch.library.opcheck(backward, (*arguments, [False, True] * 3))


def test_autocast():
    problem = Problem(60, 3, 5, 40, 32, torch.float32)
    with torch.autocast(problem.grad.device.type, torch.bfloat16):
        y = problem.call(expert_mlp, problem.tensors)
    low = {
        n: t.detach() if n == "topk_weights" else t.detach().bfloat16() for n, t in problem.tensors.items()
    }
    assert torch.equal(y, problem.call(expert_mlp, low))
    grads = torch.autograd.grad(y, problem.tensors.values(), problem.grad.bfloat16())
    assert all(g.dtype == torch.float32 and g.abs().sum() > 0 for g in grads)


@pytest.mark.bad_indices
def test_rejects():
    problem = Problem(6, 2, 3, 5, 4, torch.float32)
    x, w1, b1, w2, b2, weights = (t.detach() for t in problem.tensors.values())
    row_idx, inverse, offs = problem.row_idx, problem.inverse, problem.offs

    def call(
        x=x, row_idx=row_idx, inverse=inverse, offs=offs, w1=w1, b1=b1, weights=weights, activation="swiglu"
    ):
        return expert_mlp(x, row_idx, inverse, offs, w1, b1, w2, b2, weights, activation)

    with pytest.raises(RuntimeError, match='unknown activation "tanh": known are gelu, gelu_tanh, relu'):
        call(activation="tanh")
    with pytest.raises(RuntimeError, match=r"w1 must have shape \[E, H, D\] with size 4 in dimension 1"):
        call(activation="gelu")
    with pytest.raises(RuntimeError, match=r"row_idx\[0\] is 12"):
        call(row_idx=torch.cat([torch.tensor([12], dtype=torch.int32), row_idx[1:]]))
    with pytest.raises(RuntimeError, match="element 0 is 12"):
        call(inverse=torch.full_like(inverse, 12))
    with pytest.raises(RuntimeError, match=r"offs\[2\] is 13"):
        call(offs=torch.tensor([0, 0, 13], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"topk_weights must have the dtype of x .* got Double"):
        call(weights=weights.double())
    with pytest.raises(RuntimeError, match=r"b1 must have shape \[E, 2 \* H\] with size 8"):
        call(b1=b1[:, :4])
    with pytest.raises(RuntimeError, match="inverse must be int32"):
        call(inverse=inverse.long())


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("expert_mlp", ExpertMlp),
        ("expert_mlp_backward", ExpertMlpBackward),
        ("expert_mlp_backward_inputs", ExpertMlpBackward),
        ("expert_mlp_backward_weights", ExpertMlpBackwardWeights),
        ("frozen_mlp", FrozenMlp),
        ("frozen_mlp_backward", FrozenMlpBackward),
    ],
)
def test_arguments_have_the_schemas_names(name, arguments):
    schemas = (Path(__file__).parents[2] / "csrc" / "ops.cpp").read_text()
    declared = re.search(rf'm\.def\("{name}\((.*?)\) ->', schemas)[1]
    names = tuple(argument.split()[-1].split("=")[0] for argument in declared.split(", "))
    assert names == arguments._fields[: len(names)]
    assert len(names) >= len(arguments._fields) - len(arguments._field_defaults)
