"""Edges of memory: absurd sizes, an allocation that fails, many calls, many rows."""

import subprocess
import sys

import pytest
import torch

from fmoe_ext import ops
from fmoe_ext.ops.activations import activation_number
from tests.forked import run_python
from tests.ops.test_fuzz_broken import OPERATORS, Draw

HUGE = (2**31, 2**40, 2**61, 2**62)
OFFS, ROW_IDX = torch.zeros(1, dtype=torch.int32), torch.full((2,), -1, dtype=torch.int32)
INVERSE = torch.full((2, 1), -1, dtype=torch.int32)


def tensor(*shape, dtype=torch.float32):
    """A tensor of any shape without memory for it."""
    return torch.zeros((), dtype=dtype).expand(shape)


def mlp(d_model, hidden):
    x, w1, w2 = tensor(2, d_model), tensor(1, hidden, d_model), tensor(1, d_model, hidden)
    return ops.expert_mlp(x, ROW_IDX, INVERSE, OFFS, w1, None, w2, None)


def mlp_backward(d_model, hidden):
    x, w1, w2 = tensor(2, d_model), tensor(1, hidden, d_model), tensor(1, d_model, hidden)
    arguments = (x, x, ROW_IDX, INVERSE, OFFS, w1, w2, None, None, tensor(2, hidden))
    return torch.ops.fmoe_ext.expert_mlp_backward(
        *arguments, activation_number("gelu"), True, [True] * 5 + [False]
    )


def gemm(d_model, width):
    return ops.grouped_gemm(tensor(2, d_model), tensor(1, width, d_model), OFFS)


@torch.no_grad()
def gemm_backward(d_model, width):
    arguments = (tensor(2, width), tensor(2, d_model), tensor(1, width, d_model), OFFS, [True] * 3)
    return torch.ops.fmoe_ext.grouped_gemm_backward(*arguments)


def permuted(width, _):
    return ops.permute(tensor(2, width), ROW_IDX, INVERSE)


CALLS = {
    "expert_mlp": mlp,
    "expert_mlp_backward": mlp_backward,
    "grouped_gemm": gemm,
    "grouped_gemm_backward": gemm_backward,
    "permute": permuted,
    "unpermute": lambda width, _: ops.unpermute(tensor(2, width), ROW_IDX, INVERSE),
    "topk_gate": lambda experts, _: ops.topk_gate(tensor(2, experts), 1),
    "count_tokens": lambda experts, _: ops.count_tokens(torch.zeros(0, 1, dtype=torch.long), experts),
    "sort_tokens": lambda experts, _: ops.sort_tokens(torch.zeros(0, 1, dtype=torch.long), experts),
    "apply_capacity": lambda choices, _: ops.apply_capacity(tensor(2, choices, dtype=torch.long), 3, 1),
}


REFUSED = r"2\^31|overflow|too large|allocate|invalid|aten::contiguous|with at least one expert"
PRODUCTS = ("expert_mlp", "expert_mlp_backward", "grouped_gemm", "grouped_gemm_backward")


@pytest.mark.cpu("its checks of sizes")
@pytest.mark.parametrize("size", HUGE, ids=lambda size: f"2^{size.bit_length() - 1}")
@pytest.mark.parametrize("name", CALLS)
def test_rejects_absurd_sizes(name, size):
    if name in ("permute", "unpermute"):
        size = max(size, 2**45)  # less is a matter of memory, which qemu-user promises without having it
    pairs = [(0, size), (size, 0), (3, size), (size, 3)] if name in PRODUCTS else [(size, 3)]
    for given in pairs:
        with pytest.raises(RuntimeError, match=REFUSED):
            CALLS[name](*given)


@pytest.mark.cpu("its tensors are made before they go to the meta device")
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)
def test_fake_kernels_name_the_wrong_rank(operator):
    call = operator(Draw((5, 2, 3, 4, 6), 0))
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in call.arguments.items()
    }
    call.function(*arguments.values())
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in tensors:
        # one number is a capacity for all experts
        fewer = [] if name == "capacity" else [arguments[name][0]]
        for wrong in (arguments[name][None], *fewer):
            with pytest.raises(RuntimeError, match=rf"{name} must have (\d dimensions|shape \[)"):
                call.function(*{**arguments, name: wrong}.values())


SURVIVES = """
import resource, torch
from fmoe_ext import ops
torch.set_num_threads(1)
offs = torch.tensor([40], dtype=torch.int32)
def product(width):
    return ops.grouped_gemm(torch.ones(40, width), torch.ones(1, 2, width), offs)
product(8), product(250_000)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
wide = torch.ones(40, 750_000), torch.ones(1, 2, 750_000)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + int({free} * 2**20), before[1]))
failed = 0
try:
    ops.grouped_gemm(*wide, offs)
except (RuntimeError, MemoryError) as error:
    failed = 1
resource.setrlimit(resource.RLIMIT_AS, before)
assert torch.equal(product(24), torch.full((40, 2), 24.0))
assert torch.equal(product(25_000), torch.full((40, 2), 25_000.0))
print("failed", failed)
"""


@pytest.mark.cpu("its memory")
def test_product_after_an_allocation_that_failed():
    """Whichever of its allocations fails, the next product works."""
    failures = 0
    for free in (130, 175, 250, 312):
        result = run_python(SURVIVES.replace("{free}", str(free)))
        assert result.returncode == 0, result.stderr[-2000:]
        failures += int(result.stdout.split()[1])
    assert failures >= 1


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


KEEPS = """
import torch
from fmoe_ext import ops

def resident():  # counted page by page: statm's number is late by some pages of every core
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Rss:")) << 10

torch.set_num_threads(1)
x, weight = torch.ones(40, 1_000_000), torch.ones(1, 2, 1_000_000)
offs = torch.tensor([40], dtype=torch.int32)
ops.grouped_gemm(x[:, :64].contiguous(), weight[..., :64].contiguous(), offs)  # loads what a first call loads
before = resident()
y = ops.grouped_gemm(x, weight, offs)
ops.release_memory()
kept = resident() - before
assert torch.equal(y, torch.full((40, 2), 1e6))
print(kept)
"""


@pytest.mark.cpu("its memory")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_thread_keeps_little():
    """A panel of a million columns takes up to 128 MB, which go when the product is done."""
    result = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout) < 48 * 2**20


@pytest.mark.cpu("its memory")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat(one_thread):
    """No operator call keeps anything: 20,000 steps of a tiny layer's operators, forward and backward."""
    x, logits = torch.randn(4, 4), torch.randn(4, 3)
    w1, w2 = torch.randn(3, 4, 4), torch.randn(3, 4, 4)
    native, gelu = torch.ops.fmoe_ext, activation_number("gelu")

    def step():
        idx, weights = native.topk_gate(logits, 2, 0, True, None, 1, 1, 1.0)
        native.topk_gate_backward(weights, logits, idx, weights, 0, True, 1.0)
        _, offs, row_idx, inverse = native.sort_tokens(idx, 3)
        arguments = (x, row_idx, inverse, offs, w1, None, w2, None, weights, gelu, True, True)
        y, h = native.expert_mlp(*arguments)
        arguments = (
            y,
            x,
            row_idx,
            inverse,
            offs,
            w1,
            w2,
            None,
            weights,
            h,
            gelu,
            True,
            [True, True, False] * 2,
        )
        native.expert_mlp_backward(*arguments)

    with torch.no_grad():
        for _ in range(2000):
            step()
        before = resident()
        for _ in range(20000):
            step()
    assert resident() - before < 20000 * 24  # a leaked string would be 48 bytes, four times a step


@pytest.mark.parametrize("rows", [2**20])
def test_bias_gradient_of_many_rows(rows):
    """As exact as PyTorch's sum, which adds pairwise; row by row in float32 it would be 2.6e-4 off."""
    x, weight = torch.ones(rows, 1), torch.ones(1, 5, 1)
    bias = torch.zeros(1, 5, requires_grad=True)
    grad = torch.rand(rows, 5, generator=torch.Generator().manual_seed(0))
    ops.grouped_gemm(x, weight, torch.tensor([rows], dtype=torch.int32), bias).backward(grad)
    torch.testing.assert_close(bias.grad[0].double(), grad.double().sum(0), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kernel_obeys_the_instruction_set(isa, dtype):
    """permute, unpermute and topk_gate too: with the set limited they take their fallbacks, which are right."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 70, generator=generator).to(dtype)
    x = torch.randn(50, 100, generator=generator).to(dtype).requires_grad_()
    for options in ({}, {"score": "sigmoid", "num_groups": 7, "topk_groups": 3, "normalize": False}):
        idx, weights = ops.topk_gate(logits, 4, **options)
        wanted = ops.topk_gate_ref(logits, 4, **options)
        assert torch.equal(idx, wanted[0])
        torch.testing.assert_close(weights, wanted[1])
    weights = weights.float().requires_grad_()
    order = ops.sort_tokens(idx, 70)
    rows = ops.permute(x, order.row_idx, order.inverse)
    assert torch.equal(rows, ops.permute_ref(x, order.row_idx, order.inverse))
    grad = torch.randn(50, 100, generator=generator).to(dtype)
    results = []
    for function in (ops.unpermute, ops.unpermute_ref):
        y = function(rows.detach() + x.sum() * 0, order.row_idx, order.inverse, weights)
        results.append((y, *torch.autograd.grad(y, weights, grad)))
    torch.testing.assert_close(*results)
