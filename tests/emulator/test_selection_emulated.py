"""Choice of kernels by cuda/select.h, and results of each of them, through the emulator."""

import pytest
import torch
from gemm_cases import check_grouped_gemm, check_mlp, chosen, mlp_inputs, wgmmas_of

from fmoe_ext.ops.activations import ACTIVATIONS, GATED_ACTIVATIONS, activation_number


@pytest.fixture(autouse=True)
def hopper(emulated):
    emulated.set_device(90, 3)
    yield
    emulated._set_gpu_kernels(emulated._gpu_kernels())
    emulated.set_device(80, 3)


def hopper_kernels(emulated):
    """{product: names of its kernels}, in the order of the table."""
    kernels = {}
    for name in emulated._gpu_kernels():
        kernels.setdefault(name.split(".")[0], []).append(name)
    return kernels


def test_names(emulated):
    names = emulated._gpu_kernels()
    assert len(names) == len(set(names))
    numbers = {product: len(kernels) for product, kernels in hopper_kernels(emulated).items()}
    assert numbers == dict(up=1, rows_by_weight=2, grad_hidden=1, grad_input=2, grad_weight=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", range(2))
def test_each_kernel(emulated, n, dtype):
    """The n-th of each product, whatever the shape prefers; tails, and an odd number of row tiles."""
    names = [kernels[n % len(kernels)] for kernels in hopper_kernels(emulated).values()]
    emulated._set_gpu_kernels(names)
    counts, D, N = [0, 130, 1], 136, 264
    gemm = chosen(emulated, check_grouped_gemm, emulated, counts, D, N, dtype)
    assert gemm == [name for name in names if not name.startswith(("up", "grad_hidden"))]
    routing, tensors = mlp_inputs(150, 2, 3, D, 72, dtype, n == 0, True, torch.float32)
    activation = "gelu" if n else "swiglu"
    assert chosen(emulated, check_mlp, emulated, routing, tensors, activation, True) == names


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
    """Kernels are switched and counted by name; what is off is computed by the portable kernels."""
    offs = torch.tensor([5, 9], dtype=torch.int32)
    x, weight = torch.randn(9, 16).bfloat16(), torch.randn(2, 24, 16).bfloat16()
    emulated._set_gpu_kernels([])
    assert wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, None) == 0
    portable = emulated.grouped_gemm(x, weight, offs, None)
    names = emulated._gpu_kernels()
    for wanted in hopper_kernels(emulated)["rows_by_weight"]:
        emulated._set_gpu_kernels([wanted])
        before = emulated._gpu_kernel_runs()
        torch.testing.assert_close(emulated.grouped_gemm(x, weight, offs, None), portable)
        runs = [after - count for after, count in zip(emulated._gpu_kernel_runs(), before, strict=True)]
        assert runs == [int(name == wanted) for name in names]
    with pytest.raises(RuntimeError, match='no GPU kernel "up"'):
        emulated._set_gpu_kernels(["up"])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_selection_of_expert_mlp(emulated, activation, bias):
    """Every product on Hopper kernels, whatever the activation, with biases and without: two in forward, four in
    backward; h or no h makes no difference to the result."""
    D, H, gated = 8, 136, activation in GATED_ACTIVATIONS  # so that F1 takes less than F2
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
    offs = torch.tensor([5, 9], dtype=torch.int32)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((9, 16), (2, 24, 16), (2, 24)))
    shifted = torch.empty(49, dtype=torch.bfloat16)[1:].view(2, 24).copy_(bias)
    aligned = emulated.grouped_gemm(x, weight, offs, bias)
    assert wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, bias) > 0
    assert wgmmas_of(emulated, emulated.grouped_gemm, x, weight, offs, shifted) == 0
    torch.testing.assert_close(emulated.grouped_gemm(x, weight, offs, shifted), aligned)
