"""The same bits from run to run and with one thread or two: results, gradients and losses of whole layers.

PyTorch promises the bits of its own matrix products (a gate's linear layer, separate experts) for one number of
threads only: they run on one thread here. batch_invariant() does not use them. The operators are tested one by one in
tests/ops.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fmoe_ext import FMoE, FMoELinear, FMoETransformerMLP, batch_invariant
from fmoe_ext.gates import GATES

T, D, H, E = 700, 128, 96, 8


class TorchProductsOnOneThread(TorchDispatchMode):
    """Runs PyTorch's own matrix products on one thread."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        threads = torch.get_num_threads()
        if func.overloadpacket.__name__ in self.PRODUCTS:
            torch.set_num_threads(1)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_num_threads(threads)


def results(layer, x, threads):
    """Output, loss of the gate, gradients of x and of every parameter."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        x = x.clone().requires_grad_()
        out = layer(x)
        total = out.float().square().mean()
        loss = layer.gate.get_loss() if hasattr(layer, "gate") else None
        if loss is not None:
            total = total + loss.sum()
        wanted = [p for p in (x, *layer.parameters()) if p.requires_grad]
        grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    finally:
        torch.set_num_threads(before)
    return [out, *([] if loss is None else [loss]), *grads]


def assert_equal_results(results, expected, threads):
    assert expected[0].abs().max() > 0
    for i, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(ours, theirs), f"result {i} with {threads} threads"


def assert_reproducible(layer, x):
    for threads in (1, 2):
        assert_equal_results(results(layer, x, threads), results(layer, x, threads), threads)
    with TorchProductsOnOneThread():
        assert_equal_results(results(layer, x, 2), results(layer, x, 1), 2)


def tokens(dtype=torch.float32):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", GATES)
def test_every_gate_in_a_layer(name):
    torch.manual_seed(0)
    assert_reproducible(FMoETransformerMLP(E, D, H, activation="swiglu", gate=GATES[name]), tokens())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, H, activation=nn.GELU(), gate=GATES["softmax"]).to(dtype)
    assert_reproducible(layer, tokens(dtype))


def test_separate_experts():
    torch.manual_seed(0)
    assert_reproducible(FMoE(E, D, expert=lambda d: nn.Linear(d, d)), tokens())


class SortedRows(FMoELinear):
    def __init__(self):
        super().__init__(E, D, H)

    def forward(self, x):
        return super().forward(x, torch.tensor([0, 100, 7, 93, 0, 300, 150, 50]))


def test_linear():
    torch.manual_seed(0)
    assert_reproducible(SortedRows(), tokens())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_invariant_layer_ignores_the_number_of_threads(isa, dtype):
    """The output and the gradient of the input, with no product of PyTorch in them."""
    torch.manual_seed(0)
    layer = FMoETransformerMLP(E, D, H, activation="swiglu", gate="softmax").to(dtype)
    layer.requires_grad_(False)
    with batch_invariant():
        expected = results(layer, tokens(dtype), 1)
        assert_equal_results(results(layer, tokens(dtype), 2), expected, 2)


def test_instruction_sets(isa):
    torch.manual_seed(0)
    assert_reproducible(FMoETransformerMLP(E, D, H, activation="swiglu", gate=GATES["softmax"]), tokens())
