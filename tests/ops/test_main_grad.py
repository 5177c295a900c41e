"""Weight gradients that are added to main gradients: grouped_gemm, expert_mlp and ops.MainGrad."""

import pytest
import torch

from fmoe_ext.ops import MainGrad, expert_mlp, expert_mlp_ref, grouped_gemm, grouped_gemm_ref
from fmoe_ext.testing import assert_close
from tests.ops.test_expert_mlp import DTYPES, SWIGLU, Problem
from tests.ops.test_grouped_gemm import make_inputs

native = torch.ops.fmoe_ext
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
OFFS = [3, 3, 20, 45]  # expert 1 has no rows


def parameter(t, fill=0.0):
    """A parameter with the values of t and a main gradient."""
    p = torch.nn.Parameter(t.detach().clone())
    dtype = torch.float64 if t.dtype == torch.float64 else torch.float32
    p.main_grad = torch.full_like(p, fill, dtype=dtype)
    return p


def gemm_step(weight, seed, **options):
    """Forward and backward of one micro-batch of 50 rows; those from 45 on reach no expert."""
    _, N, D = weight.shape
    x, _, offs, _, grad = make_inputs(50, D, N, OFFS, weight.dtype, seed)
    y = grouped_gemm(x, weight, offs, **options)
    y.backward(grad.to(y.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(37, 29), (64, 48), (1, 3)], ids=str)
def test_grouped_gemm_accumulates(isa, sizes, dtype):
    """The main gradient grows by the gradient before rounding, step for step."""
    weight = make_inputs(50, *sizes, OFFS, dtype)[1]
    fused, expected = parameter(weight), None
    for seed in range(4):
        returned = parameter(weight)
        gemm_step(returned, seed)
        alone = parameter(weight)
        gemm_step(alone, seed, main_grad=MainGrad(alone))
        assert torch.equal(alone.main_grad.to(dtype), returned.grad)
        gemm_step(fused, seed, main_grad=MainGrad(fused))
        expected = alone.main_grad if expected is None else expected + alone.main_grad
        assert torch.equal(fused.main_grad, expected)
    assert fused.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm_is_as_exact_as_its_main_gradient(dtype):
    """Over several steps as close to the truth as float32 is, and so closer than gradients rounded to 16 bits."""
    values = make_inputs(50, 40, 24, OFFS, dtype)[1]
    fused, low = parameter(values), parameter(values)
    truth, plain = parameter(values.double()), parameter(values.to(fused.main_grad.dtype))
    for seed in range(6):
        gemm_step(fused, seed, main_grad=MainGrad(fused))
        gemm_step(low, seed)
        for reference in (truth, plain):  # the same numbers in more bits
            x, _, offs, _, grad = make_inputs(50, 40, 24, OFFS, dtype, seed)
            y = grouped_gemm_ref(x.detach().to(reference.dtype), reference, offs)
            y.backward(grad.to(reference.dtype))
    if dtype == torch.float64:
        torch.testing.assert_close(fused.main_grad, truth.grad, rtol=1e-12, atol=1e-12)
        return
    assert_close(fused.main_grad, truth.grad, plain.grad, "main_grad")
    if dtype in SIXTEEN_BITS:
        assert error(fused.main_grad, truth.grad) < error(low.grad, truth.grad) / 1000


def error(ours, truth):
    return torch.linalg.vector_norm(ours.double() - truth)


@pytest.mark.parametrize("fill", [0.5, float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows_leave_it_alone(dtype, fill):
    weight = parameter(make_inputs(50, 24, 40, OFFS, dtype)[1], fill)
    gemm_step(weight, 0, main_grad=MainGrad(weight))
    assert torch.equal(weight.main_grad[1].isnan(), torch.full((40, 24), fill != fill))
    if fill == fill:
        assert (weight.main_grad[1] == fill).all()
        assert (weight.main_grad[[0, 2, 3]] != fill).any((1, 2)).all()


class Fused:
    """A Problem whose weights are parameters with main gradients."""

    def __init__(self, *arguments, fill=0.0, **options):
        self.problem = Problem(*arguments, **options)
        self.w1, self.w2 = (parameter(self.problem.tensors[name], fill) for name in ("w1", "w2"))
        self.main_grads = (MainGrad(self.w1), MainGrad(self.w2))

    def forward(self, x=None, main_grads=None):
        tensors = {**self.problem.tensors, "w1": self.w1, "w2": self.w2}
        if x is not None:
            tensors["x"] = x
        main_grads = self.main_grads if main_grads is None else main_grads

        def function(*arguments):
            return expert_mlp(*arguments, main_grads)

        return self.problem.call(function, tensors)

    def backward(self, y):
        others = [t for n, t in self.problem.tensors.items() if t is not None and n not in ("w1", "w2")]
        y.backward(self.problem.grad.to(y.dtype), inputs=[*others, self.w1, self.w2])


SHAPES = [(60, 3, 5, 37, 29), (33, 4, 20, 16, 8), (1, 2, 3, 16, 5), (0, 2, 3, 4, 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expert_mlp_accumulates(shape, combine, dtype):
    fused = Fused(*shape, dtype, combine=combine)
    expected = fused.problem.results(expert_mlp)
    y = fused.forward()
    assert torch.equal(y, expected["y"])
    fused.backward(y)
    first = [w.main_grad.clone() for w in (fused.w1, fused.w2)]
    for name, main_grad in zip(("w1", "w2"), first, strict=True):
        assert torch.equal(main_grad.to(dtype), expected[name]), name
    for name in ("x", "b1", "b2", "topk_weights"):
        assert torch.equal(fused.problem.tensors[name].grad, expected[name]), name
    fused.backward(fused.forward())
    for w, once in zip((fused.w1, fused.w2), first, strict=True):
        assert torch.equal(w.main_grad, once + once)
        assert w.grad is None


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_mlp_over_several_steps(dtype, activation):
    """As close to the truth as plain PyTorch's gradients that are summed in float32; closer than 16-bit sums."""
    shape = (90, 2, 4, 40, 24)
    fused = Fused(*shape, dtype, activation)
    low, truth, plain = ([0, 0] for _ in range(3))
    for step in range(6):
        x = torch.randn(90, 40, generator=torch.Generator().manual_seed(step)).to(dtype)
        fused.backward(fused.forward(x.clone().requires_grad_()))
        for sums, function, working, summed in (
            (low, expert_mlp, dtype, dtype),
            (truth, expert_mlp_ref, torch.float64, torch.float64),
            (plain, expert_mlp_ref, dtype, fused.w1.main_grad.dtype),
        ):
            tensors = {n: t.detach().to(working).requires_grad_() for n, t in fused.problem.tensors.items()}
            tensors["x"] = x.to(working).requires_grad_()
            grads = fused.problem.results(function, tensors)
            for i, name in enumerate(("w1", "w2")):
                sums[i] = sums[i] + grads[name].to(summed)
    for i, w in enumerate((fused.w1, fused.w2)):
        if dtype == torch.float64:
            torch.testing.assert_close(w.main_grad, truth[i], rtol=1e-12, atol=1e-12)
            continue
        assert_close(w.main_grad, truth[i], plain[i], f"w{i + 1}.main_grad")
        if dtype in SIXTEEN_BITS:
            assert error(w.main_grad, truth[i]) < 0.7 * error(low[i], truth[i])


@pytest.mark.cpu("how it cuts experts into chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_expert_over_several_chunks(dtype):
    topk_idx = (torch.arange(4000) % 50 > 0)[:, None].int()
    fused = Fused(4000, 1, 2, 8, 3100, dtype, "relu", topk_idx=topk_idx)
    expected = fused.problem.results(expert_mlp)
    fused.backward(fused.forward())
    for name in ("w1", "w2"):
        assert torch.equal(getattr(fused, name).main_grad.to(dtype), expected[name]), name


def test_forwards_before_backwards():
    """A pipeline: the main gradients change between the forward and the backward of a micro-batch."""
    together, apart = (Fused(60, 3, 5, 37, 29, torch.bfloat16) for _ in range(2))
    xs = [torch.randn(60, 37, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    pending = [together.forward(x.clone().requires_grad_()) for x in xs]
    for y in pending:
        together.backward(y)
    for x in xs:
        apart.backward(apart.forward(x.clone().requires_grad_()))
    for name in ("w1", "w2"):
        assert torch.equal(getattr(together, name).main_grad, getattr(apart, name).main_grad), name


def test_bitwise_equal_for_any_number_of_threads(isa):
    found = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            fused = Fused(400, 3, 5, 100, 80, torch.bfloat16, fill=0.25)
            fused.backward(fused.forward())
            found.append((fused.w1.main_grad, fused.w2.main_grad))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_one_weight_alone():
    fused = Fused(40, 2, 3, 20, 24, torch.bfloat16)
    expected = fused.problem.results(expert_mlp)
    fused.backward(fused.forward(main_grads=(None, MainGrad(fused.w2))))
    assert torch.equal(fused.w1.grad, expected["w1"]) and not fused.w1.main_grad.any()
    assert fused.w2.grad is None and torch.equal(fused.w2.main_grad.bfloat16(), expected["w2"])

    frozen = Fused(40, 2, 3, 20, 24, torch.bfloat16)
    frozen.w1.requires_grad_(False)
    del frozen.w1.main_grad
    y = frozen.forward()
    y.backward(frozen.problem.grad)
    assert torch.equal(frozen.w2.main_grad.bfloat16(), expected["w2"])


def test_parts_of_a_parameter():
    """MainGrad.split gives the main gradients of the parts that Tensor.split gives."""
    x, values, offs, _, grad = make_inputs(50, 24, 40, OFFS, torch.bfloat16)
    whole, parts = parameter(values), parameter(values)
    grouped_gemm(x, whole, offs, main_grad=MainGrad(whole)).backward(grad)
    begin, sizes = 0, (1, 3)
    rows = (slice(0, 3), slice(3, 50))
    for weight, main_grad, here in zip(parts.split(sizes), MainGrad(parts).split(sizes), rows, strict=True):
        ends = offs[begin : begin + len(weight)] - here.start
        grouped_gemm(x[here], weight, ends, main_grad=main_grad).backward(grad[here])
        begin += len(weight)
    assert torch.equal(parts.main_grad, whole.main_grad)
    assert parts.grad is None


def test_main_grad_sets_megatron_flag():
    """A parameter that Megatron's DistributedDataParallel marks gets a gradient of its shape, to be ignored."""
    fused = Fused(40, 2, 3, 20, 24, torch.bfloat16)
    fused.w1.grad_added_to_main_grad = False
    fused.w2.grad_added_to_main_grad, fused.w2.zero_out_wgrad = False, True
    fused.backward(fused.forward())
    assert fused.w1.grad_added_to_main_grad is True and fused.w2.grad_added_to_main_grad is True
    assert fused.w1.grad.shape == fused.w1.shape and fused.w1.grad.dtype == torch.bfloat16
    assert fused.w2.grad.shape == fused.w2.shape and not fused.w2.grad.any()


def test_autocast():
    fused = Fused(60, 3, 5, 40, 32, torch.float32)
    low = Fused(60, 3, 5, 40, 32, torch.float32)
    low.problem.tensors = {
        n: t.detach() if n == "topk_weights" else t.detach().bfloat16()
        for n, t in low.problem.tensors.items()
    }
    low.w1, low.w2 = parameter(low.w1.bfloat16()), parameter(low.w2.bfloat16())
    low.main_grads = (MainGrad(low.w1), MainGrad(low.w2))
    device = fused.w1.device.type
    with torch.autocast(device, torch.bfloat16):
        y = fused.forward()
    y_low = low.forward()
    assert y.dtype == torch.bfloat16 and torch.equal(y, y_low)
    fused.backward(y)
    y_low.backward(low.problem.grad.bfloat16())
    assert fused.problem.tensors["x"].grad.dtype == torch.float32
    for name in ("w1", "w2"):
        assert torch.equal(getattr(fused, name).main_grad, getattr(low, name).main_grad), name

    weight = parameter(make_inputs(50, 24, 40, OFFS, torch.float32)[1])
    with torch.autocast(device, torch.bfloat16):
        gemm_step(weight, 0, main_grad=MainGrad(weight))
    other = parameter(weight.detach().bfloat16())
    gemm_step(other, 0, main_grad=MainGrad(other))  # draws the same numbers
    assert torch.equal(weight.main_grad, other.main_grad)


MISFITS = {
    "none": (lambda w: None, r"has none: wrap the model in Megatron-core's.*dtype=torch.float32\)"),
    "dtype": (
        lambda w: w.main_grad.bfloat16(),
        r"must be torch.float32, shape \[3, 48, 20\].*torch.bfloat16",
    ),
    "shape": (
        lambda w: w.main_grad[:, :5],
        r"must be torch.float32.*it is torch.float32, shape \[3, 5, 20\]",
    ),
    "device": (lambda w: w.main_grad.to("meta"), r"on cpu, but it is .* on meta"),
}


@pytest.mark.cpu("the message names it")
@pytest.mark.parametrize("misfit", MISFITS)
def test_main_grad_that_does_not_fit_is_rejected(misfit):
    change, message = MISFITS[misfit]
    fused = Fused(40, 2, 3, 20, 24, torch.bfloat16)
    y = fused.forward()
    fused.w1.main_grad = change(fused.w1)
    with pytest.raises(RuntimeError, match=message):
        fused.backward(y)
    assert not fused.w2.main_grad.any()


@torch.no_grad()
def test_native_arguments_are_rejected():
    x, weight, offs, _, grad = (t.detach() for t in make_inputs(7, 3, 4, [2, 2, 6], torch.bfloat16))

    def call(main):
        return native.grouped_gemm_backward(grad, x, weight, offs, [True] * 3, main)

    with pytest.raises(
        RuntimeError, match="main_dweight must be float32 for weight of BFloat16, but got BFloat16"
    ):
        call(torch.zeros(3, 4, 3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"the shape of weight \[3, 4, 3\], but got shape \[3, 3, 4\]"):
        call(torch.zeros(3, 3, 4))
    with pytest.raises(RuntimeError, match="main_dweight must be contiguous"):
        call(torch.zeros(3, 3, 4).mT)
    main = torch.zeros(3, 4, 3)
    assert not native.grouped_gemm_backward(grad, x, weight, offs, [True, False, True], main)[1].numel()
    assert not main.any()  # not needed
    with pytest.raises(ValueError, match="transposed=True and main_grad"):
        grouped_gemm(x, weight.mT, offs, transposed=True, main_grad=MainGrad(parameter(weight)))


def test_second_derivative_raises():
    fused = Fused(5, 2, 3, 3, 4, torch.float64)
    x = fused.problem.tensors["x"]
    (dx,) = torch.autograd.grad(fused.forward().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@torch.no_grad()
def test_opcheck():
    x, weight, offs, _, grad = (t.detach() for t in make_inputs(7, 3, 4, [2, 2, 6], torch.bfloat16))
    main = torch.randn(weight.shape)
    op = native.grouped_gemm_backward.default
    for needs in ([True] * 3, [False, True, False], [True, False, True]):
        torch.library.opcheck(op, (grad, x, weight, offs, needs, main))

    problem = Problem(6, 2, 3, 5, 4, torch.bfloat16)
    x, w1, b1, w2, b2, weights = (t.detach() for t in problem.tensors.values())
    indices = (problem.row_idx, problem.inverse, problem.offs)
    h = native.expert_mlp(x, *indices, w1, b1, w2, b2, weights, SWIGLU, True, True)[1]
    arguments = (problem.grad, x, *indices, w1, w2, b2, weights, h, SWIGLU, True)
    op = native.expert_mlp_backward.default
    mains = torch.randn(w1.shape), torch.randn(w2.shape)
    torch.library.opcheck(op, (*arguments, [True] * 6, *mains))
    torch.library.opcheck(op, (*arguments, [False, True] * 3, *mains))
    torch.library.opcheck(op, (*arguments, [True] * 6, None, mains[1]))
    torch.library.opcheck(op, (*arguments, [True] * 6, None, None))


@pytest.mark.parametrize("name", ["expert_mlp", "grouped_gemm"])
def test_compile_breaks_the_graph_and_says_so(name):
    def step(compiled):
        if name == "expert_mlp":
            fused = Fused(20, 2, 3, 16, 8, torch.bfloat16)
            fused.backward(compiled(fused.forward) * 1)
            return fused.w1.main_grad, fused.w2.main_grad, fused.problem.tensors["x"].grad
        weight = parameter(make_inputs(50, 24, 40, OFFS, torch.bfloat16)[1])
        x, _, offs, _, grad = make_inputs(50, 24, 40, OFFS, torch.bfloat16)
        compiled(lambda: grouped_gemm(x * 1, weight, offs, main_grad=MainGrad(weight)) * 1).backward(grad)
        return weight.main_grad, x.grad

    expected = step(lambda function: function())
    got = step(lambda function: torch.compile(function, backend="aot_eager")())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    torch.compiler.reset()
    with pytest.raises(Exception, match="main_grad by code that a compiled graph cannot hold"):
        step(lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)())
