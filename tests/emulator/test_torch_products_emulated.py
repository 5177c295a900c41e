"""Products that torch's grouped_mm computes between our kernels, on CPU tensors through the emulator."""

import itertools

import pytest
import torch
from gemm_cases import check_grouped_gemm, check_mlp, mlp_inputs

from fmoe_ext.gpu import proof as gpu_proof
from fmoe_ext.gpu import torch_path
from fmoe_ext.gpu.proof import ROWS
from fmoe_ext.ops.activations import activation_number

PRODUCTS = ("up", "rows_by_weight", "grad_hidden", "grad_input", "grad_weight", "main_grad")
B200, H100, A100 = 100, 90, 80


def classes(products, numbers=("16 bits", "tf32")):
    return [f"{p}/{n}/{r}" for p, n, (r, _) in itertools.product(products, numbers, ROWS)]


@pytest.fixture(autouse=True)
def torch_product(emulated):
    emulated.set_device(B200, 3)
    library = torch_path.install_products("CPU")
    yield
    del library
    emulated._set_gpu_torch_wins([])
    emulated.set_capturing(False)
    emulated.set_device(A100, 3)


def by_torch(emulated, function, *arguments):
    """{product: times} of a call that torch computed."""
    before = emulated._gpu_torch_runs()
    function(*arguments)
    runs = zip(PRODUCTS, before, emulated._gpu_torch_runs(), strict=True)
    return {name: after - earlier for name, earlier, after in runs if after > earlier}


def test_classes_are_those_of_proofs(emulated):
    assert emulated._gpu_torch_classes() == classes(PRODUCTS)
    with pytest.raises(RuntimeError, match='there is no class of products "up"'):
        emulated._set_gpu_torch_wins(["up"])


SUBSETS = [(p,) for p in PRODUCTS[:5]] + [PRODUCTS, ("up", "grad_weight"), ("rows_by_weight", "grad_hidden")]


@pytest.mark.parametrize(("dtype", "capability"), [(torch.bfloat16, B200), (torch.float16, H100)])
@pytest.mark.parametrize("products", SUBSETS, ids="+".join)
def test_expert_mlp_with_each_subset(emulated, products, dtype, capability):
    """Experts without rows, dropped choices, biases, a gate: what torch's product leaves to our kernels."""
    emulated.set_device(capability, 3)
    emulated._set_gpu_torch_wins(classes(products))
    for gated, bias, combine in ((True, True, True), (False, False, False)):
        routing, tensors = mlp_inputs(33, 3, 5, 24, 40, dtype, gated, bias, torch.float32)
        ran = by_torch(
            emulated, check_mlp, emulated, routing, tensors, "swiglu" if gated else "gelu", combine
        )
        assert ran == {p: 2 if p == "grad_weight" else 1 for p in products if p != "main_grad"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 130, 1]], ids=str)
def test_grouped_gemm(emulated, counts, dtype):
    emulated._set_gpu_torch_wins(classes(PRODUCTS))
    with torch_path.tf32(True):
        ran = by_torch(emulated, check_grouped_gemm, emulated, counts, 24, 40, dtype)
    assert ran.keys() == {"rows_by_weight", "grad_input", "grad_weight"}


@pytest.mark.parametrize("shifted", [False, True])
def test_main_gradients(emulated, shifted):
    """A product in 16 bits and a sum in float32; experts without rows are not read, and torch gets no float32."""
    routing, (x, w1, _, w2, _, weights) = mlp_inputs(
        19, 2, 4, 24, 40, torch.bfloat16, True, False, torch.float32
    )
    index, options = (routing.row_idx, routing.inverse, routing.offs), (activation_number("swiglu"), True)
    h = emulated.expert_mlp(x, *index, w1, None, w2, None, weights, *options, True)[1]
    grad = torch.randn(19, 24, generator=torch.Generator().manual_seed(9)).bfloat16()
    arguments = (grad, x, *index, w1, w2, None, weights, h, *options, [True, True, False, True, False, True])
    emulated._set_gpu_torch_wins(classes(["grad_weight"]))
    expected = emulated.expert_mlp_backward(*arguments)
    emulated._set_gpu_torch_wins(classes(["main_grad"]))
    empty = routing.offs.diff(prepend=routing.offs.new_zeros(1)) == 0
    assert empty.any()
    mains = [
        torch.full((w.numel() + 2,), 3.0)[2 if shifted else 0 :][: w.numel()].view(w.shape) for w in (w1, w2)
    ]
    for main in mains:
        main[empty] = torch.nan
    originals, mains = mains, [torch._lazy_clone(main) for main in mains]
    assert by_torch(emulated, emulated.expert_mlp_backward, *arguments, *mains) == {"main_grad": 2}
    assert all((main[~empty] == 3).all() for main in originals)
    for main, product in zip(mains, (expected[1], expected[3]), strict=True):
        assert torch.equal(main[~empty], product[~empty].float() + 3) and main[empty].isnan().all()


def test_problems_torch_cannot_take_are_computed_by_ours(emulated):
    """Widths that it would copy, float64, float32 without TF32, 1,024 experts, a capture that would read the host."""
    emulated._set_gpu_torch_wins(classes(PRODUCTS))

    def ran(E=2, D=16, dtype=torch.bfloat16, shift=0):
        x = torch.ones(4 * D + shift, dtype=dtype)[shift:].view(4, D)
        offs = torch.full((E,), 4, dtype=torch.int32)
        return bool(
            by_torch(emulated, emulated.grouped_gemm, x, torch.ones(E, 8, D, dtype=dtype), offs, None)
        )

    assert ran() and ran(E=1023)
    assert not ran(E=1024) and not ran(D=12) and not ran(shift=1)
    assert not ran(dtype=torch.float64) and not ran(dtype=torch.float32)
    with torch_path.tf32(True):
        assert ran(dtype=torch.float32)
    assert ran(dtype=torch.float16)
    emulated.set_capturing(True)
    assert ran() and not ran(dtype=torch.float16)
    for capability, is_capturable in (
        (90, True),
        (100, True),
        (103, True),
        (80, False),
        (89, False),
        (120, False),
    ):
        emulated.set_device(capability, 3)
        emulated._set_gpu_kernels([])
        assert ran() == is_capturable, capability
    emulated._set_gpu_kernels(emulated._gpu_kernels())


def test_class_is_decided_by_rows_an_expert(emulated):
    emulated._set_gpu_torch_wins(["rows_by_weight/16 bits/hundreds"])
    weight = torch.ones(2, 8, 16).bfloat16()
    for num_rows, expected in ((127, {}), (128, {"rows_by_weight": 1})):
        x, offs = torch.ones(num_rows, 16).bfloat16(), torch.tensor([60, num_rows], dtype=torch.int32)
        assert by_torch(emulated, emulated.grouped_gemm, x, weight, offs, None) == expected
        assert gpu_proof.rows_class(num_rows, 2) == ("hundreds" if expected else "few")


@pytest.mark.parametrize("offs", [[5, 2, 90], [-4, 3, 3], [2**31 - 1, 0, 0]])
def test_garbage_offsets_reach_torch_clamped(emulated, offs):
    emulated._set_gpu_torch_wins(classes(PRODUCTS))
    x, weight = torch.randn(6, 8).bfloat16(), torch.randn(3, 8, 8).bfloat16()
    ends = torch.tensor(offs, dtype=torch.int32)
    assert emulated.grouped_gemm(x, weight, ends, None).isfinite().all()
    for grad in emulated.grouped_gemm_backward(x, x, weight, ends, [True] * 3):
        assert grad.isfinite().all()
