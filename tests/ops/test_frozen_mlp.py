"""frozen_mlp: expert_mlp with frozen weights and adapters, against PEFT's formula in plain PyTorch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fmoe_ext.adapters import Lora
from fmoe_ext.frozen import frozen_mlp, frozen_mlp_ref
from fmoe_ext.frozen.frozen_mlp import Borrowed, composed, composed_backward, frozen_mlp_borrowing
from fmoe_ext.ops import expert_mlp
from fmoe_ext.ops.activations import ACTIVATIONS, activation_number
from fmoe_ext.testing import assert_close
from tests.ops import frozen_arguments
from tests.ops.test_expert_mlp import DTYPES, Problem

SHAPES = [
    (0, 2, 3, 4, 5, 2),
    (1, 2, 3, 16, 5, 1),
    (70, 2, 3, 3, 33, 5),
    (33, 4, 20, 9, 5, 8),
    (150, 2, 2, 65, 100, 16),
]


class Frozen:
    """One call with adapters of a rank; left_out: names of tensors that are None."""

    def __init__(self, T, K, E, D, H, rank, dtype, activation="swiglu", left_out=(), **options):
        problem = Problem(T, K, E, D, H, dtype, activation, **options)
        generator = torch.Generator().manual_seed(T + D)
        width = problem.tensors["w1"].shape[1]
        shapes = {"a1": (E, rank, D), "b1": (E, width, rank), "a2": (E, rank, H), "b2": (E, D, rank)}
        self.base = {n: t if t is None else t.detach() for n, t in problem.tensors.items()}
        self.learned = {
            n: problem.tensors[n] for n in ("x", "topk_weights") if problem.tensors[n] is not None
        }
        for name, shape in shapes.items():
            if name not in left_out:
                tensor = torch.randn(shape, generator=generator) * (shape[2] ** -0.5)
                self.learned[f"lora_{name}"] = tensor.to(dtype).requires_grad_()
        self.problem = problem

    def call(self, function, dtype=None, learned=None):
        learned = self.learned if learned is None else learned
        t = {n: None if t is None else t.to(dtype or t.dtype) for n, t in {**self.base, **learned}.items()}
        lora = [
            Lora(t[f"lora_a{i}"], t[f"lora_b{i}"], scale) if f"lora_a{i}" in t else None
            for i, scale in ((1, 0.5), (2, 2.0))
        ]
        p = self.problem
        return function(
            t["x"], p.row_idx, p.inverse, p.offs, t["w1"], t["b1"], t["w2"], t["b2"], t["topk_weights"],
            p.activation, p.combine, *lora,
        )  # fmt: skip

    def results(self, function, dtype=None):
        learned = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in self.learned.items()}
        y = self.call(function, dtype, learned)
        grads = torch.autograd.grad(y, learned.values(), self.problem.grad.to(y.dtype))
        return {"y": y.detach(), **dict(zip(learned, grads, strict=True))}

    def check(self, function=frozen_mlp):
        truth, plain = self.results(frozen_mlp_ref, torch.float64), self.results(frozen_mlp_ref)
        for name, got in self.results(function).items():
            if got.dtype == torch.float64:
                torch.testing.assert_close(got, truth[name], rtol=1e-11, atol=1e-11)
            else:
                assert_close(got, truth[name], plain[name], name)

    def arguments(self, **changes):
        p = self.problem
        given = {**self.base, **{n: t.detach() for n, t in self.learned.items()}}
        given |= {
            "row_idx": p.row_idx,
            "inverse": p.inverse,
            "offs": p.offs,
            "lora_scale1": 0.5,
            "lora_scale2": 2.0,
        }
        given |= {"activation": activation_number(p.activation), "combine": p.combine}
        return frozen_arguments.forward(**{**given, **changes})

    def backward_arguments(self, kept):
        needs = [True] * 5 + [self.base["topk_weights"] is not None]
        return frozen_arguments.backward(self.arguments(), self.problem.grad, kept, needs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(isa, dtype, activation, request):
    if activation == "relu" and dtype.itemsize == 2 and request.config.getoption("--device") == "cuda":
        pytest.skip("adapters are added to rounded products there, so a sign may turn at zero")
    Frozen(60, 3, 5, 37, 29, 4, dtype, activation).check()
    Frozen(60, 2, 3, 32, 48, 3, dtype, activation, bias=False, weights=False, combine=False).check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, combine, dtype):
    Frozen(*shape, dtype, combine=combine).check()


def test_expert_over_several_chunks():
    topk_idx = (torch.arange(4000) % 50 > 0)[:, None].int()
    Frozen(4000, 1, 2, 8, 1100, 4, torch.float32, "relu", topk_idx=topk_idx).check()


@pytest.mark.parametrize("left_out", [("a1", "b1"), ("a2", "b2")], ids=["second alone", "first alone"])
def test_adapter_on_one_weight(left_out):
    Frozen(60, 3, 5, 37, 29, 4, torch.float64, left_out=left_out).check()


@pytest.mark.cpu("on CUDA the two are other products: their bits differ")
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_adapters_it_is_expert_mlp(isa, dtype):
    case = Frozen(60, 3, 5, 37, 29, 4, dtype, left_out=("a1", "b1", "a2", "b2"))
    frozen, usual = case.results(frozen_mlp), case.results(lambda *a: expert_mlp(*a[:11]))
    assert torch.equal(frozen["y"], usual["y"]) and torch.equal(frozen["x"], usual["x"])


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@torch.no_grad()
def test_composition_for_cuda_equals_the_kernel(combine, weights):
    case = Frozen(60, 3, 5, 37, 29, 4, torch.float64, combine=combine, weights=weights)
    arguments = case.arguments()
    kernel, by_products = torch.ops.fmoe_ext.frozen_mlp(*arguments), composed(*arguments)
    for name, got, expected in zip(("y", "h", "u1", "u2"), by_products, kernel, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12, msg=name)
    backward = case.backward_arguments(kernel[1:])
    expected = torch.ops.fmoe_ext.frozen_mlp_backward(*backward)
    for got, wanted in zip(composed_backward(*backward), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    case = Frozen(5, 2, 3, 4, 3, 2, torch.float64)
    names = list(case.learned)

    def function(*tensors):
        return case.call(frozen_mlp, learned=dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(case.learned.values()))


def test_keeps_rank_rows_beside_what_expert_mlp_keeps():
    case = Frozen(200, 2, 4, 32, 24, 4, torch.float32)
    kept = []

    def pack(t):
        kept.append((t.data_ptr(), t.untyped_storage().nbytes()))
        return t

    weights = {t.data_ptr() for t in (*case.base.values(), *case.learned.values())}

    def size_of(function):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            case.call(function)
        return sum(dict(item for item in kept if item[0] not in weights).values())

    rank_rows = 2 * 400 * 4 * 4  # two adapters, T * K rows, rank 4, float32
    assert size_of(frozen_mlp) <= size_of(lambda *a: expert_mlp(*a[:11])) + rank_rows


class Kept(TorchDispatchMode):
    """Numbers of the pre-activation that frozen_mlp returns for its backward."""

    size = -1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.fmoe_ext.frozen_mlp.default:
            self.size = results[1].numel()
        return results


@pytest.mark.parametrize("needs_grad", [True, False])
def test_borrowed_weights_keep_the_pre_activation_for_a_backward_only(needs_grad):
    x, w1, w2 = torch.randn(6, 8), torch.randn(2, 16, 8), torch.randn(2, 8, 16)
    offs, row_weights = torch.tensor([4, 6], dtype=torch.int32), torch.rand(6, 1)
    borrowed = Borrowed(lambda: (w1, w2), lambda: (w1, w2), offs, "gelu", (1.0, 1.0))
    with Kept() as kept:
        y = frozen_mlp_borrowing(borrowed, x.requires_grad_(needs_grad), row_weights, *[None] * 6)
    assert kept.size == (6 * 16 if needs_grad else 0)
    rows = torch.arange(6, dtype=torch.int32)
    expected = frozen_mlp(x, rows, rows[:, None], offs, w1, None, w2, None, row_weights, combine=False)
    assert torch.equal(y, expected)


@pytest.mark.cpu("opcheck compares with the composition that CUDA has")
@torch.no_grad()
def test_opcheck():
    case = Frozen(9, 2, 3, 5, 4, 2, torch.float64)
    arguments = case.arguments()
    torch.library.opcheck(torch.ops.fmoe_ext.frozen_mlp, arguments)
    kept = torch.ops.fmoe_ext.frozen_mlp(*arguments)[1:]
    torch.library.opcheck(torch.ops.fmoe_ext.frozen_mlp_backward, case.backward_arguments(kept))


def test_results_do_not_depend_on_threads():
    case = Frozen(600, 2, 3, 40, 32, 8, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(case.results(frozen_mlp))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.cpu("autocast of the CPU")
def test_autocast_casts_adapters_too():
    case = Frozen(30, 2, 3, 16, 8, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = case.call(frozen_mlp)
    keeps = {"topk_weights"}  # as expert_mlp does
    cast = {n: t.detach().to(t.dtype if n in keeps else torch.bfloat16) for n, t in case.learned.items()}
    case.base = {n: t.to(torch.bfloat16) for n, t in case.base.items()}
    assert y.dtype == torch.bfloat16 and torch.equal(y, case.call(frozen_mlp, learned=cast))


def test_torch_func_grad_equals_backward():
    case = Frozen(9, 2, 3, 5, 4, 2, torch.float64)
    names = list(case.learned)

    def loss(tensors):
        return (case.call(frozen_mlp, learned=tensors) * case.problem.grad).sum()

    grads = torch.func.grad(loss)({n: t.detach() for n, t in case.learned.items()})
    expected = case.results(frozen_mlp)
    for name in names:
        torch.testing.assert_close(grads[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.cpu("autocast of the CPU")
def test_torch_func_grad_under_autocast_equals_backward():
    case = Frozen(9, 2, 3, 5, 4, 2, torch.float32)

    def loss(tensors):
        return (case.call(frozen_mlp, learned=tensors) * case.problem.grad).sum()

    with torch.autocast("cpu", torch.bfloat16):
        grads = torch.func.grad(loss)({n: t.detach() for n, t in case.learned.items()})
        expected = dict(
            zip(case.learned, torch.autograd.grad(loss(case.learned), case.learned.values()), strict=True)
        )
    for name, gradient in expected.items():
        assert torch.equal(grads[name], gradient), name


def test_trainable_weight_is_refused_by_name():
    case = Frozen(9, 2, 3, 5, 4, 2, torch.float32)
    case.base["w2"].requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"^w2 requires a gradient, which frozen_mlp does not compute: freeze it"
    ):
        case.call(frozen_mlp)


@pytest.mark.cpu("its tensors are on the CPU")
@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "lora_a1",
            torch.zeros(3, 2, 6),
            r"lora_a1 must have shape \[E, rank, in\] with size 5 in dimension 2",
        ),
        (
            "lora_b2",
            torch.zeros(3, 5, 3),
            r"lora_b2 must have shape \[E, out, rank\] with size 2 in dimension 2",
        ),
        ("lora_a2", torch.zeros(3, 2, 4, dtype=torch.float64), r"lora_a2 must have the dtype of x \(Float\)"),
        ("lora_b1", None, "lora_a1 and lora_b1 must be given together"),
    ],
)
def test_adapters_that_do_not_fit_are_named(name, value, message):
    arguments = Frozen(9, 2, 3, 5, 4, 2, torch.float32).arguments(**{name: value})
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fmoe_ext.frozen_mlp(*arguments)
