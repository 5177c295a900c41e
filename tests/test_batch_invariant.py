"""batch_invariant(): the bits of a token's output and gradient do not depend on the batch it came in."""

from functools import partial

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext import (
    FMoE,
    FMoETransformerMLP,
    RoutingReplay,
    batch_invariant,
    ops,
    packed_sequences,
    use_batch_invariant,
)
from fmoe_ext.gates import GATES, DCGate, NaiveGate, SigmoidGate, SoftmaxGate, SwitchGate
from tests.ops import instruction_sets

D, H, E, T = 48, 24, 4, 257
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = (1, 2, 5, 8, 13, 33, 129)


def layer(gate=SoftmaxGate, dtype=torch.float32, **options):
    torch.manual_seed(0)
    options = {"activation": "swiglu", "shared_expert_hidden": 24, "shared_expert_gate": True, **options}
    return FMoETransformerMLP(E, D, H, gate=gate, **options).to(dtype)


def tokens(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, T, D, generator=generator).to(dtype)
    return x, grad


def run(module, x, grad, **kwargs):
    """Output and input gradient."""
    x = x.clone().requires_grad_()
    out = module(x, **kwargs)
    return out.detach(), torch.autograd.grad(out, x, grad)[0]


def assert_same(ours, whole, rows):
    for name, a, b in zip(("output", "gradient"), ours, whole, strict=True):
        assert torch.equal(a, b[rows]), f"{name} of {len(a)} tokens is off by {(a - b[rows]).abs().max()}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("isa", instruction_sets.ISAS)
def test_every_size_and_position(isa, dtype):
    module, (x, grad) = layer(dtype=dtype), tokens(dtype)
    with instruction_sets.restored(), batch_invariant():
        instruction_sets.use(isa)
        whole = run(module, x, grad)
        for size in SIZES:
            rows = torch.arange(T // 2 - size, T // 2)
            assert_same(run(module, x[rows], grad[rows]), whole, rows)
        order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
        assert_same(run(module, x[order], grad[order]), whole, order)


def test_every_size_from_1_to_257():
    module, (x, grad) = layer(SigmoidGate), tokens()
    with batch_invariant():
        whole = run(module, x, grad)
        for size in range(1, T + 1):
            rows = torch.arange(T - size, T)
            assert_same(run(module, x[rows], grad[rows]), whole, rows)


def test_without_the_mode_bits_depend_on_the_batch():
    module, (x, grad) = layer(), tokens()
    whole, alone = run(module, x, grad), run(module, x[:3], grad[:3])
    assert not torch.equal(alone[0], whole[0][:3]), "then the tests of this file show nothing"


def test_result_is_that_of_the_layer_without_the_mode():
    module, (x, grad) = layer(dtype=torch.float64), tokens(torch.float64)
    plain = run(module, x, grad)
    with batch_invariant():
        ours = run(module, x, grad)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "gate", sorted(GATES.keys() - {"uniform", "expert_choice", "switch", "gshard", "sqrtsoftplus"})
)
def test_gates(gate):
    module, (x, grad) = layer(gate).eval(), tokens()
    with batch_invariant():
        whole = run(module, x, grad)
        for size in (1, 7, 40):
            rows = torch.arange(50, 50 + size)
            assert_same(run(module, x[rows], grad[rows]), whole, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_and_packed(dtype):
    module, (x, grad) = layer(dtype=dtype), tokens(dtype)
    rows = torch.arange(3, T, 9)
    valid = torch.zeros(T, dtype=torch.bool).index_fill(0, rows, True)
    with batch_invariant():
        whole = run(module, x, grad)
        padded = run(module, x, grad, valid=valid)
        assert_same([part[rows] for part in padded], whole, rows)
        with packed_sequences(torch.tensor([0, 5, 5, 21])):
            assert_same(run(module, x[:21], grad[:21]), whole, torch.arange(21))


def test_experts_in_one_module_of_our_operators():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = fmoe_ext.FMoELinear(E, D, D)

        def forward(self, rows, tokens_per_expert):
            return self.up(rows, tokens_per_expert).relu()

    class Layer(FMoE):
        def __init__(self):
            super().__init__(E, D, gate=SoftmaxGate)
            self.experts = Experts()

    torch.manual_seed(0)
    module, (x, grad) = Layer(), tokens()
    with batch_invariant():
        whole = run(module, x, grad)
        assert_same(run(module, x[9:12], grad[9:12]), whole, torch.arange(9, 12))


REFUSED = {
    "capacity_factor=1.0": partial(SoftmaxGate, capacity_factor=1.0),
    "jitter=0.1": partial(SigmoidGate, jitter=0.1),
    r"capacity=\(1.2, 2.4\)": SwitchGate,
    "switch_eps=0.1": partial(SwitchGate, capacity=None),
    "place in the batch": GATES["uniform"],
    "experts choose": GATES["expert_choice"],
    "balances the choices": GATES["sinkhorn"],
    "noise in training": GATES["noisy"],
    "at random": DCGate,
    "PyTorch's softplus": GATES["sqrtsoftplus"],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_batch_dependent_parts_are_refused(reason):
    module, (x, _) = layer(REFUSED[reason]), tokens()
    module(x)
    with batch_invariant(), pytest.raises(RuntimeError, match=reason):
        module(x)


def test_separate_experts_are_refused():
    module = FMoE(E, D, gate=NaiveGate, expert=lambda d: nn.Linear(d, d))
    with batch_invariant(), pytest.raises(RuntimeError, match="torch's products"):
        module(tokens()[0])


def test_torch_activation_is_refused():
    module = layer(activation=torch.tanh)
    with batch_invariant(), pytest.raises(RuntimeError, match="their activation is torch's"):
        module(tokens()[0])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gate", [SoftmaxGate, SigmoidGate])
def test_groups_and_replayed_choices(gate, normalize):
    gate = partial(gate, num_groups=2, topk_groups=1, group_best=2, normalize=normalize)
    module, (x, _) = layer(gate), tokens()
    with batch_invariant():
        whole, replay = module(x), RoutingReplay(module)
        for size in (1, 7, 40):
            rows = torch.arange(50, 50 + size)
            with replay.record():
                assert torch.equal(module(x[rows]), whole[rows])
            with replay.play():
                played = module(x[rows])
            with replay.record():
                module(x)
            with replay.play():
                assert torch.equal(played, module(x)[rows])


def test_switch():
    assert not ops.is_batch_invariant()
    with batch_invariant():
        with batch_invariant():
            assert ops.is_batch_invariant()
        assert ops.is_batch_invariant()
    assert not ops.is_batch_invariant()
    with pytest.raises(ZeroDivisionError), batch_invariant():
        raise ZeroDivisionError
    assert not ops.is_batch_invariant()
    use_batch_invariant(True)
    try:
        assert ops.is_batch_invariant()
    finally:
        use_batch_invariant(False)


def test_compiled_program_follows_the_switch():
    module, (x, _) = layer(shared_expert_gate=False).eval(), tokens()
    compiled = torch.compile(module, backend="eager", dynamic=True)
    with torch.no_grad():
        plain = compiled(x)
        with batch_invariant():
            whole, expected = compiled(x), module(x)
            assert torch.equal(whole, expected)
            assert torch.equal(compiled(x[:3]), whole[:3])
        assert torch.equal(compiled(x), plain)
