"""Every operator and public function under jvp, forward_ad, vmap, grad, grad of grad and backward: right, or refused.

One table (tests/ops/operators.py) for all. Right is what finite differences in float64 say; a refusal names what it
refuses. Silence would be a derivative of zero.
"""

import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp

from fmoe_ext import ops
from fmoe_ext.ep import shadowing, traced  # noqa: F401  operators are registered where they are used
from fmoe_ext.ep.process_groups import register_group
from tests.ops.operators import CALLS, NOT_DRAWN, OF_RANKS, WITHOUT_FLOATS, Draw, topk_gate_again

pytestmark = [
    pytest.mark.cpu("finite differences are in float64, which our kernels of a GPU do not have"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.usefixtures("one_thread"),
]
REFUSED = re.compile(
    "cannot be differentiated|has no forward-mode derivative|cannot transform|cannot be transformed|"
    "no gradient of its own|no autograd formula was registered|"  # torch's own words for operators in Python
    "autograd.Function with functorch transforms|vmap: .*in-place|does not require grad|requires_grad_"
)
STEP = 1e-5
OPERATORS = {**CALLS, **OF_RANKS, "topk_gate_again": topk_gate_again}
# Only a CUDA device has their kernels: tests/on_cuda.py
OF_CUDA = ("_decode_packed", "_torch_grouped_mm")


@pytest.fixture(scope="module", autouse=True)
def group_of_this_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    register_group()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def functions(name):
    """(function of one tensor, that tensor) for each floating argument of the operator as it is registered, and, if it
    has one, of its public function: the sum of all results, each element times a factor of its own."""
    call = OPERATORS[name](Draw((3, 2, 3, 4, 4), 0))
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.arguments.items()}
    function = getattr(call.function, "raw", call.function)

    def of(place):
        def scalar(t):
            given = {**arguments, place: t}
            mains = {k: v.clone() for k, v in given.items() if k.startswith("main_") and k != place}
            found = function(*{**given, **mains}.values())
            total = t.new_zeros(())
            for out in [found] if isinstance(found, torch.Tensor) else found or ():
                if out.is_floating_point():
                    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
                    total = total + (out.sin() * weights).sum()
            return total

        return scalar

    for place, t in arguments.items():
        if isinstance(t, torch.Tensor) and t.is_floating_point() and not place.startswith("main_"):
            yield place, of(place), t


def difference(f, x, direction):
    with torch.no_grad():
        return (f(x + STEP * direction) - f(x - STEP * direction)) / (2 * STEP)


def by_func(f, x, v):
    return jvp(f, (x,), (v,))[1]


def by_dual(f, x, v):
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent
    return torch.zeros(()) if tangent is None else tangent


def by_grad(f, x, v):
    return (grad(f)(x) * v).sum()


def by_backward(f, x, v):
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    (found,) = torch.autograd.grad(y, leaf, allow_unused=True)
    return torch.zeros(()) if found is None else (found * v).sum()


def squared(first):
    """Of the gradient of f, its square's derivative in direction v, by finite differences or by a derivative again."""

    def again(f, x, v):
        return by_grad(lambda x: grad(f)(x).square().sum(), x, v)

    def by_double_backward(f, x, v):
        leaf = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(f(leaf), leaf, create_graph=True, allow_unused=True)
        if found is None:  # as the bias of topk_gate, which chooses alone
            return torch.zeros(())
        (second,) = torch.autograd.grad(found.square().sum(), leaf)
        return (second * v).sum()

    return again if first == "func" else by_double_backward


def outcome(derive, f, x, v):
    """The derivative, or None where it is refused in words that say so."""
    try:
        return derive(f, x, v).detach()
    except (RuntimeError, NotImplementedError) as error:
        assert REFUSED.search(str(error)), error
        return None


def test_table_has_every_operator():
    """test_every_operator_is_drawn compares CALLS and NOT_DRAWN with the sources."""
    assert {*CALLS, *NOT_DRAWN} == {*CALLS, *OF_RANKS, *WITHOUT_FLOATS, *OF_CUDA}


@pytest.mark.parametrize("derive", [by_func, by_dual, by_grad, by_backward])
@pytest.mark.parametrize("name", OPERATORS)
def test_derivative_is_right_or_refused(name, derive):
    for place, f, x in functions(name):
        with torch.no_grad():
            v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
            expected = difference(f, x, v)
        found = outcome(derive, f, x, v)
        if found is not None:
            torch.testing.assert_close(
                found, expected, rtol=1e-5, atol=1e-6, msg=lambda t, p=place: f"{p}: {t}"
            )


@pytest.mark.parametrize("kind", ["func", "backward"])
@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivative_is_right_or_refused(name, kind):
    for place, f, x in functions(name):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        found = outcome(squared(kind), f, x, v)
        if found is None:
            continue

        def square(x, f=f):
            with torch.enable_grad():
                leaf = x.detach().clone().requires_grad_()
                y = f(leaf)
                if not y.requires_grad:  # choices and counts alone
                    return torch.zeros(())
                found = torch.autograd.grad(y, leaf, materialize_grads=True, allow_unused=True)
                return found[0].square().sum()

        expected = (square(x + STEP * v) - square(x - STEP * v)) / (2 * STEP)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda t, p=place: f"{p}: {t}")


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_is_right_or_refused(name):
    for _, f, x in functions(name):
        with torch.no_grad():
            many = torch.stack([x, 2 * x, -x])
            try:
                found = torch.vmap(f)(many)
            except (RuntimeError, ValueError) as error:
                assert re.search("vmap|functorch|Batching rule not implemented", str(error)), error
                continue
            torch.testing.assert_close(found, torch.stack([f(x) for x in many]))


# Those that a caller of fmoe_ext.ops can differentiate once, and twice; the table must not become one of refusals.
ONCE = (
    *(
        "clamped_glu",
        "expert_mlp",
        "grouped_gemm",
        "newton_schulz",
        "permute",
        "topk_gate",
        "topk_gate_again",
    ),
    "unpermute",
)
TWICE = ("newton_schulz", "permute", "topk_gate", "topk_gate_again", "unpermute")


@pytest.mark.parametrize("name", ONCE)
def test_public_functions_have_their_derivatives(name):
    for place, f, x in functions(name):
        if (name, place) == ("topk_gate", "bias"):  # which chooses, and has no gradient
            continue
        assert outcome(by_backward, f, x, torch.ones_like(x)) is not None
        if name != "clamped_glu" and name != "newton_schulz":  # which the table calls as operators
            assert outcome(by_grad, f, x, torch.ones_like(x)) is not None
            for kind in ("func", "backward"):
                found = outcome(squared(kind), f, x, torch.ones_like(x))
                assert (found is not None) == (name in TWICE), (place, kind)


def test_newton_schulz_has_every_derivative():
    coefficients, x = (2.0, -1.5, 0.5), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)) / 4
    v = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))

    def f(x):
        return ops.newton_schulz(x, coefficients, 2).sin().sum()

    expected = difference(f, x, v)
    for derive in (by_func, by_dual, by_grad, by_backward):
        torch.testing.assert_close(derive(f, x, v), expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.vmap(f)(torch.stack([x, -x / 2])), torch.stack([f(x), f(-x / 2)]))


@pytest.mark.long
@pytest.mark.parametrize("name", ONCE)
def test_compiled_derivatives_are_right_or_refused(name):
    place, f, x = next(iter(functions(name)))
    v = torch.ones_like(x)
    expected = difference(f, x, v)
    for derive in (by_func, by_grad):
        torch.compiler.reset()
        compiled = torch.compile(lambda x, derive=derive: derive(f, x, v), backend="aot_eager")
        found = outcome(lambda f, x, v, compiled=compiled: compiled(x), f, x, v)
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
    found = outcome(by_grad, torch.compile(f, backend="aot_eager"), x, v)
    if name not in ("clamped_glu", "newton_schulz"):  # which the table calls as operators
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
