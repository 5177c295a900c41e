"""grouped_gemm and expert_mlp of cuda/ against the oracles of fmoe_ext.ops, on CPU tensors through the emulator."""

import pytest
import torch
from gemm_cases import NAMES, check_grouped_gemm, check_mlp, mlp_inputs, run_mlp, wgmmas_of

from fmoe_ext.ops.activations import ACTIVATIONS, GATED_ACTIVATIONS, activation_number

# (dtype, capability of the device that the emulator claims to be): on 9.0, 16-bit types take the Hopper kernels
PLACES = [(dtype, 80) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
PLACES += [(torch.bfloat16, 90), (torch.float16, 90)]
COUNTS = [[3, 0, 5], [0, 130, 1], [0, 0], [70]]
RELU = activation_number("relu")


@pytest.fixture(autouse=True)
def capability(emulated, request):
    callspec = getattr(request.node, "callspec", None)
    emulated.set_device(callspec.params.get("sm", 80) if callspec else 80, 3)
    yield
    emulated.set_device(80, 3)


@pytest.mark.parametrize(("dtype", "sm"), PLACES)
@pytest.mark.parametrize("sizes", [(1, 1), (24, 40), (37, 3), (160, 136)])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_grouped_gemm(emulated, counts, sizes, dtype, sm):
    check_grouped_gemm(emulated, counts, *sizes, dtype)


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
        got = emulated.grouped_gemm_backward(grad, x, weight, offs, needs, main)
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
        assert wgmmas_of(emulated, emulated.grouped_gemm_backward, *weight_only, shifted) == 0
        there = ~main.isnan()
        torch.testing.assert_close(shifted[there], main[there] / 2, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("dtype", "sm"), [(torch.float32, 80), (torch.bfloat16, 90)])
def test_main_gradient_that_is_a_lazy_clone_leaves_the_original(emulated, dtype, sm):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 8), (2, 16, 8), (5, 16))
    )
    original = torch.zeros(2, 16, 8)
    main = torch._lazy_clone(original)
    offs = torch.tensor([3, 5], dtype=torch.int32)
    emulated.grouped_gemm_backward(grad, x, weight, offs, [False, True, False], main)
    expected = torch.stack([grad[a:b].float().mT @ x[a:b].float() for a, b in ((0, 3), (3, 5))])
    torch.testing.assert_close(main, expected)
    assert not original.any()


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
        got = list(emulated.expert_mlp_backward(*arguments, *mains))
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
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expert_mlp_activations(emulated, activation, dtype, sm):
    gated = activation in GATED_ACTIVATIONS
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


@pytest.mark.parametrize("sm", [90])
@pytest.mark.parametrize("H", [72, 136])
def test_expert_mlp_backward_infinite_up_leaves_gate_columns_beyond_h_out(emulated, H, sm):
    """The gate's last tile ends beyond H; up's first columns, infinite here, are no part of it."""
    routing, tensors = mlp_inputs(40, 1, 1, 24, H, torch.bfloat16, True, True, torch.float32)
    x, w1, b1, w2, b2, topk_weights = tensors
    b1[:, H:] = -torch.inf
    index = (routing.row_idx, routing.inverse, routing.offs)
    options = (activation_number("clamped_swiglu"), True)
    y, h = emulated.expert_mlp(x, *index, w1, b1, w2, b2, topk_weights, *options, True)
    assert h[..., H:].isinf().any() and y.isfinite().all()
    needs = [False, False, False, False, False, True]
    grads = emulated.expert_mlp_backward(
        torch.ones_like(x), x, *index, w1, w2, b2, topk_weights, h, *options, needs
    )
    assert grads[5].isfinite().all()


def test_rejects_with_the_values(emulated):
    x, weight, offs = torch.zeros(4, 8), torch.zeros(2, 3, 7), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E, N, D\].*got shape \[2, 3, 7\]"):
        emulated.grouped_gemm(x, weight, offs, None)
    number = len(ACTIVATIONS)
    with pytest.raises(RuntimeError, match=rf"activation must be in \[0, {number}\), .* but got {number}"):
        index = (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32), offs)
        emulated.expert_mlp(x, *index, weight, None, weight, None, None, number, True, False)
