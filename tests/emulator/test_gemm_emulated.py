"""grouped_gemm and expert_mlp of cuda/ against the oracles of fmoe_ext.ops, on CPU tensors through the emulator."""

import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.ops.expert_mlp import activation_number
from fmoe_ext.testing import assert_close

# (dtype, capability of the device that the emulator claims to be): on 9.0, 16-bit types take the Hopper kernels
PLACES = [(dtype, 80) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
PLACES += [(torch.bfloat16, 90), (torch.float16, 90)]
COUNTS = [[3, 0, 5], [0, 130, 1], [0, 0], [70]]


@pytest.fixture(autouse=True)
def capability(emulated, request):
    callspec = getattr(request.node, "callspec", None)
    emulated.set_device(callspec.params.get("sm", 80) if callspec else 80, 3)
    yield
    emulated.set_device(80, 3)


def check(ours, truth, plain, name):
    if ours.dtype == torch.float64:  # plain is the truth here
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-13, msg=lambda text: f"{name}: {text}")
    else:
        assert_close(ours, truth, plain, name)


def gradients(function, tensors, grad, dtype):
    """Result and gradients of function(*tensors) in dtype, None where a tensor is None."""
    leaves = [t if t is None else t.to(dtype).detach().requires_grad_() for t in tensors]
    out = function(*leaves)
    if not out.requires_grad:  # there are no rows
        return [out, *(None for t in leaves)]
    needed = [t for t in leaves if t is not None]
    grads = iter(torch.autograd.grad(out, needed, grad.to(dtype), allow_unused=True))
    return [out.detach(), *(None if t is None else next(grads) for t in leaves)]


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("sizes", [(1, 1), (24, 40), (37, 3), (160, 136)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_gemm(emulated, counts, sizes, dtype, sm):
    D, N = sizes
    E, R = len(counts), sum(counts) + 3
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((R, D), (E, N, D), (E, N), (R, N))
    )
    offs = torch.tensor(counts).cumsum(0).int()

    y = emulated.grouped_gemm(x, weight, offs, bias)
    grads = emulated.grouped_gemm_backward(grad, x, weight, offs, [True, True, True])

    def reference(x, weight, bias):
        return ops.grouped_gemm_ref(x, weight, offs, bias)

    truth = gradients(reference, (x, weight, bias), grad, torch.float64)
    plain = gradients(reference, (x, weight, bias), grad, dtype)
    for name, ours, true, other in zip(
        ("y", "dx", "dweight", "dbias"), (y, *grads), truth, plain, strict=True
    ):
        check(ours, true, other, name)
    if weight.shape[1] > 1:
        column_major = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(emulated.grouped_gemm(x, column_major, offs, bias), y)
    skipped = emulated.grouped_gemm_backward(grad, x, weight, offs, [False, True, False])
    assert [t.numel() > 0 for t in skipped] == [False, True, False]
    assert torch.equal(skipped[1], grads[1])


def mlp_inputs(T, K, E, D, H, dtype, gated, bias, weights, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    topk_idx = torch.randint(-1, E, (T, K), generator=generator)
    if E > 2:
        topk_idx[topk_idx == 1] = 2  # an expert without rows
    routing = ops.sort_tokens_ref(topk_idx, E)
    F = 2 * H if gated else H
    x, w1, w2 = random(T, D), random(E, F, D, scale=D**-0.5), random(E, D, H, scale=H**-0.5)
    b1, b2 = (random(E, F), random(E, D)) if bias else (None, None)
    topk_weights = torch.rand(T, K, generator=generator).to(weights) if weights else None
    return routing, (x, w1, b1, w2, b2, topk_weights)


def run_mlp(emulated, routing, tensors, activation, combine, grad):
    x, w1, b1, w2, b2, topk_weights = tensors
    index = (routing.row_idx, routing.inverse, routing.offs)
    options = (activation_number(activation), combine)
    y, h = emulated.expert_mlp(x, *index, w1, b1, w2, b2, topk_weights, *options, True)
    needs = [True, True, b1 is not None, True, b2 is not None, topk_weights is not None]
    grads = emulated.expert_mlp_backward(grad, x, *index, w1, w2, b2, topk_weights, h, *options, needs)
    return [y, *(grad if needed else None for grad, needed in zip(grads, needs, strict=True))]


RELU = activation_number("relu")
NAMES = ("y", "dx", "dw1", "db1", "dw2", "db2", "dtopk_weights")


def check_mlp(emulated, routing, tensors, activation, combine):
    x, topk_weights = tensors[0], tensors[-1]
    rows = x.shape[0] if combine else routing.row_idx.shape[0]
    grad = torch.randn(rows, x.shape[1], generator=torch.Generator().manual_seed(9)).to(x.dtype)

    def reference(x, w1, b1, w2, b2, weights):
        index = (routing.row_idx, routing.inverse, routing.offs)
        return ops.expert_mlp_ref(x, *index, w1, b1, w2, b2, weights, activation, combine)

    ours = run_mlp(emulated, routing, tensors, activation, combine, grad)
    truth, plain = (gradients(reference, tensors, grad, dtype) for dtype in (torch.float64, x.dtype))
    for name, one, true, other in zip(NAMES, ours, truth, plain, strict=True):
        if one is None:
            assert true is None
            continue
        if true is None:  # not used by any row
            assert not one.any(), name
            continue
        if name == "dtopk_weights" and topk_weights.dtype != x.dtype:
            other = other.to(topk_weights.dtype)
        check(one, true, other, name)


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 130, 1], [0, 0]], ids=str)
def test_grouped_gemm_into_main_gradient(emulated, counts, dtype, sm):
    """Adds to float32 (or float64) what the operator would return, before it is rounded; twice, twice as much."""
    E, R, D, N = len(counts), sum(counts) + 3, 40, 136
    generator = torch.Generator().manual_seed(0)
    shapes = ((R, D), (E, N, D), (R, N))
    x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    offs, needs = torch.tensor(counts).cumsum(0).int(), [True, True, True]
    expected = emulated.grouped_gemm_backward(grad, x, weight, offs, needs)
    main = torch.zeros(E, N, D, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    main[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan  # experts without rows are not read either
    multiplied = []
    for times in (1, 2):
        before = emulated.wgmmas()
        got = emulated.grouped_gemm_backward_accumulate(grad, x, weight, offs, needs, main)
        multiplied.append(emulated.wgmmas() - before)
        assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
        assert got[1].numel() == 0
        for e, count in enumerate(counts):
            assert (
                torch.equal((main[e] / times).to(dtype), expected[1][e]) if count else main[e].isnan().all()
            )
    assert all(n > 0 for n in multiplied) == (sm == 90 and sum(counts) > 0)
    if sum(counts) and sm == 90:  # a view that begins at 8 bytes: the portable kernels
        shifted = torch.zeros(E * N * D + 2)[2:].view(E, N, D)
        weight_only = (grad, x, weight, offs, [False, True, False])
        assert wgmmas_of(emulated, emulated.grouped_gemm_backward_accumulate, *weight_only, shifted) == 0
        there = ~main.isnan()
        torch.testing.assert_close(shifted[there], main[there] / 2, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_expert_mlp_into_main_gradients(emulated, activation, dtype, sm):
    routing, tensors = mlp_inputs(19, 2, 4, 24, 40, dtype, activation == "swiglu", True, dtype)
    x, w1, b1, w2, b2, topk_weights = tensors
    index = (routing.row_idx, routing.inverse, routing.offs)
    h = emulated.expert_mlp(
        x, *index, w1, b1, w2, b2, topk_weights, activation_number(activation), True, True
    )[1]
    grad = torch.randn(19, 24, generator=torch.Generator().manual_seed(9)).to(dtype)
    arguments = (
        grad,
        x,
        *index,
        w1,
        w2,
        b2,
        topk_weights,
        h,
        activation_number(activation),
        True,
        [True] * 6,
    )
    expected = emulated.expert_mlp_backward(*arguments)
    for given in ((True, True), (False, True), (True, False)):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        mains = [
            torch.zeros(w.shape, dtype=wide) if wanted else None
            for w, wanted in zip((w1, w2), given, strict=True)
        ]
        got = list(emulated.expert_mlp_backward_accumulate(*arguments, *mains))
        for i, main in zip((1, 3), mains, strict=True):
            if main is not None:
                assert got[i].numel() == 0
                got[i] = main.to(dtype)
        for name, one, other in zip(NAMES[1:], got, expected, strict=True):
            assert torch.equal(one, other), (name, given)


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("combine", [True, False])
def test_expert_mlp_backward_in_halves(emulated, combine, dtype, sm):
    """The same bits as the whole, in as many matrix products."""
    routing, tensors = mlp_inputs(19, 2, 4, 24, 40, dtype, True, True, dtype)
    x, w1, b1, w2, b2, topk_weights = tensors
    index, options = (routing.row_idx, routing.inverse, routing.offs), (activation_number("swiglu"), combine)
    h = emulated.expert_mlp(x, *index, w1, b1, w2, b2, topk_weights, *options, True)[1]
    rows = 19 if combine else 38
    grad = torch.randn(rows, 24, generator=torch.Generator().manual_seed(9)).to(dtype)
    arguments, needs = (grad, x, *index, w1, w2), [True] * 6
    rest = (b2, topk_weights, h, *options, needs)
    whole = emulated.expert_mlp_backward(*arguments, *rest)
    dx, dweights, *kept = emulated.expert_mlp_backward_inputs(*arguments, *rest)
    of_weights = (*arguments, topk_weights, *kept, *options, needs, None, None)
    parts = (dx, *emulated.expert_mlp_backward_weights(*of_weights), dweights)
    for name, one, other in zip(NAMES[1:], parts, whole, strict=True):
        assert torch.equal(one, other), name
    products = wgmmas_of(emulated, emulated.expert_mlp_backward_inputs, *arguments, *rest)
    products += wgmmas_of(emulated, emulated.expert_mlp_backward_weights, *of_weights)
    assert products == wgmmas_of(emulated, emulated.expert_mlp_backward, *arguments, *rest)


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh"])
def test_expert_mlp_activations(emulated, activation, dtype, sm):
    gated = activation in ("swiglu", "geglu", "geglu_tanh")
    routing, tensors = mlp_inputs(19, 2, 4, 24, 40, dtype, gated, True, dtype)
    check_mlp(emulated, routing, tensors, activation, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", [None, torch.float32])
def test_expert_mlp_options(emulated, weights, bias, combine, dtype):
    routing, tensors = mlp_inputs(33, 3, 5, 37, 13, dtype, True, bias, weights)
    check_mlp(emulated, routing, tensors, "swiglu", combine)


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("sm", [90])
def test_expert_mlp_options_on_hopper(emulated, weights, bias, combine, sm):
    routing, tensors = mlp_inputs(70, 3, 3, 136, 72, torch.bfloat16, True, bias, weights)
    check_mlp(emulated, routing, tensors, "swiglu", combine)


@pytest.mark.parametrize(("dtype", "sm"), [(torch.float32, 80), (torch.bfloat16, 90)])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 3), (1, 1, 1), (150, 1, 1)])
def test_expert_mlp_shapes(emulated, T, K, E, dtype, sm):
    routing, tensors = mlp_inputs(T, K, E, 16, 8, dtype, False, True, torch.float32)
    check_mlp(emulated, routing, tensors, "gelu", True)
    routing, tensors = mlp_inputs(T, K, E, 16, 8, dtype, True, False, torch.float32)
    check_mlp(emulated, routing, tensors, "swiglu", True)


@pytest.mark.parametrize("sm", [90])
def test_many_rows_an_expert(emulated, sm):
    """So many that pairs of thread blocks share the tiles of the weights; an odd number of row tiles."""
    routing, tensors = mlp_inputs(2200, 1, 1, 16, 8, torch.bfloat16, True, False, torch.float32)
    row_tiles = -(-int(routing.offs[-1]) // 128)
    assert routing.row_idx.numel() >= 2048 and row_tiles % 2 == 1
    check_mlp(emulated, routing, tensors, "swiglu", True)


def wgmmas_of(emulated, op, *arguments):
    before = emulated.wgmmas()
    op(*arguments)
    return emulated.wgmmas() - before


def test_selection(emulated):
    """Hopper kernels on 9.0 alone, for 16-bit types, widths that are multiples of 8 and aligned matrices."""
    offs = torch.tensor([5, 9], dtype=torch.int32)

    def count(sm, dtype=torch.bfloat16, D=16, N=24, offset=0):
        emulated.set_device(sm, 2)
        x = torch.zeros(9 * D + offset, dtype=dtype)[offset:].view(9, D)
        weight, grad = torch.zeros(2, N, D, dtype=dtype), torch.zeros(9, N, dtype=dtype)
        backward = emulated.grouped_gemm_backward
        return [
            wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, None),
            wgmmas_of(emulated, backward, grad, x, weight, offs, [True, False, False]),
            wgmmas_of(emulated, backward, grad, x, weight, offs, [False, True, False]),
            wgmmas_of(emulated, backward, grad, x, weight, offs, [False, False, True]),
        ]

    y, dx, dweight, dbias = count(90)
    assert min(y, dx, dweight) > 0 and dbias == 0
    assert min(count(90, torch.float16)[:3]) > 0
    nothing = [0, 0, 0, 0]
    assert count(90, torch.float32) == nothing
    assert count(80) == count(89) == count(100) == nothing
    assert count(90, D=12) == count(90, N=12) == nothing
    assert count(90, offset=4) == nothing
    assert min(count(90, offset=8)[:3]) > 0


def test_switches(emulated):
    """Kernels are named, counted and switched by name; what is off is computed by the portable kernels."""
    emulated.set_device(90, 2)
    offs = torch.tensor([5, 9], dtype=torch.int32)
    x, weight = torch.randn(9, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    names = emulated._gpu_kernels()
    assert len(names) == len(set(names))
    results = {}
    try:
        for wanted in (
            "rows_by_weight.64x192",
            "rows_by_weight.128x192.pairs",
            "rows_by_weight.128x256.pairs",
            None,
        ):
            emulated._set_gpu_kernels([] if wanted is None else [wanted])
            before = emulated._gpu_kernel_runs()
            results[wanted] = emulated.grouped_gemm(x, weight, offs, None)
            runs = [after - count for after, count in zip(emulated._gpu_kernel_runs(), before, strict=True)]
            assert runs == [int(name == wanted) for name in names]
        with pytest.raises(RuntimeError, match='no GPU kernel "up"'):
            emulated._set_gpu_kernels(["up"])
    finally:
        emulated._set_gpu_kernels(names)
    for result in results.values():
        torch.testing.assert_close(result, results[None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh"])
def test_selection_of_expert_mlp(emulated, activation, bias):
    """Every product on Hopper kernels, whatever the activation, with biases and without: two in forward, four in
    backward; h or no h makes no difference to the result."""
    emulated.set_device(90, 2)
    D, H, gated = 8, 136, activation in ("swiglu", "geglu", "geglu_tanh")  # so that F1 takes less than F2
    routing, (x, w1, b1, w2, b2, _) = mlp_inputs(10, 1, 2, D, H, torch.bfloat16, gated, bias, None)
    index = (routing.row_idx, routing.inverse, routing.offs)
    down = wgmmas_of(emulated, emulated.grouped_gemm, torch.zeros(10, H).bfloat16(), w2, routing.offs, b2)
    arguments = (x, *index, w1, b1, w2, b2, None, activation_number(activation), True)
    both = wgmmas_of(emulated, emulated.expert_mlp, *arguments, True)
    assert 0 < both - down < down
    y, h = emulated.expert_mlp(*arguments, True)
    assert wgmmas_of(emulated, emulated.expert_mlp, *arguments, False) == both
    without_h = emulated.expert_mlp(*arguments, False)
    assert torch.equal(without_h[0], y) and without_h[1].numel() == 0
    for needed in range(4):
        needs = [i == needed for i in range(6)]
        rest = (x, *index, w1, w2, b2, None, h, activation_number(activation), True, needs)
        assert wgmmas_of(emulated, emulated.expert_mlp_backward, x, *rest) > 0, needed


def test_bias_that_is_not_aligned(emulated):
    """A bias that begins between 16-byte boundaries sends the call to the portable kernels; both give the same."""
    emulated.set_device(90, 2)
    offs = torch.tensor([5, 9], dtype=torch.int32)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((9, 16), (2, 24, 16), (2, 24)))
    shifted = torch.empty(49, dtype=torch.bfloat16)[1:].view(2, 24).copy_(bias)
    aligned = emulated.grouped_gemm(x, weight, offs, bias)
    assert wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, bias) > 0
    assert wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, shifted) == 0
    torch.testing.assert_close(emulated.grouped_gemm(x, weight, offs, shifted), aligned)


@pytest.mark.parametrize(("dtype", "sm"), [(torch.float32, 80), (torch.bfloat16, 90)])
def test_garbage_indices_touch_nothing_outside(emulated, dtype, sm):
    """Whatever the indices hold, results have the right shape and memory is only read where it exists."""
    x, weight = torch.randn(6, 8).to(dtype), torch.randn(3, 8, 8).to(dtype)
    for offs in ([5, 2, 90], [-4, 3, 3], [2**31 - 1, 0, 0]):
        assert emulated.grouped_gemm(x, weight, torch.tensor(offs, dtype=torch.int32), None).isfinite().all()
    row_idx = torch.tensor([3, -9, 2**31 - 1, 0, 1, 7], dtype=torch.int32)
    inverse = torch.tensor([[0], [1], [2**31 - 1], [-5], [4], [5]], dtype=torch.int32)
    offs = torch.tensor([2, 4, 6], dtype=torch.int32)
    weights = torch.rand(6, 1)
    for combine in (True, False):
        index = (row_idx, inverse, offs)
        y, h = emulated.expert_mlp(x, *index, weight, None, weight, None, weights, RELU, combine, True)
        assert y.shape == (6, 8)
        assert y.isfinite().all()
        arguments = (x, *index, weight, weight, None, weights, h, RELU, combine, [True] * 6)
        for grad in emulated.expert_mlp_backward(y, *arguments):
            assert grad.isfinite().all()


@pytest.mark.parametrize("sm", [80, 90])
def test_same_bits_in_every_schedule(emulated, sm):
    routing, tensors = mlp_inputs(40, 2, 3, 24, 16, torch.bfloat16, True, True, torch.float32)
    grad = torch.ones(40, 24, dtype=torch.bfloat16)
    first = run_mlp(emulated, routing, tensors, "swiglu", True, grad)
    for seed in (1, 2):
        emulated.set_schedule(seed, 4)
        again = run_mlp(emulated, routing, tensors, "swiglu", True, grad)
        emulated.set_schedule(0, 0)
        for name, one, other in zip(NAMES, first, again, strict=True):
            assert torch.equal(one, other), name


def test_rejects_with_the_values(emulated):
    x, weight, offs = torch.zeros(4, 8), torch.zeros(2, 3, 7), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E, N, D\].*got shape \[2, 3, 7\]"):
        emulated.grouped_gemm(x, weight, offs, None)
    with pytest.raises(RuntimeError, match=r"activation must be in \[0, 7\), .* but got 7"):
        index = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32), offs)
        emulated.expert_mlp(x, *index, weight, None, weight, None, None, 7, True, False)
