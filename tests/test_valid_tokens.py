"""A padded batch gives the numbers of the unpadded one, and packed sequences those of each alone."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from fmoe_ext import FMoE, FMoETransformerMLP, balance, packed_sequences, valid_tokens
from fmoe_ext.gates import GATES, SigmoidGate, SoftmaxGate, sequence_balance_loss, total_loss, z_loss

D, E = 6, 4
B, S = 3, 7
LENGTHS = (4, 7, 2)
SCORED = {
    "capacity": partial(SoftmaxGate, capacity_factor=0.7),
    "capacity by token": partial(SoftmaxGate, capacity_factor=0.7, drop_policy="token"),
    "capacity by score": partial(SoftmaxGate, capacity_factor=0.7, drop_policy="score"),
    "z loss and jitter": partial(SoftmaxGate, z_weight=0.3, jitter=0.2),
    "groups": partial(SigmoidGate, num_groups=2, topk_groups=1, balance_loss="global"),
}


def mask(side):
    lengths = torch.tensor(LENGTHS)[:, None]
    place = torch.arange(S)
    return place < lengths if side == "right" else place >= S - lengths


def layer(gate, **options):
    torch.manual_seed(0)
    return FMoETransformerMLP(E, D, 5, gate=gate, **options).double()


def numbers(module, x, *args, seed=3):
    """Output, loss of the gate, gradients of input and parameters."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    out = module(x, *args)
    loss = total_loss(module)
    parameters = [x, *module.parameters()]
    target = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    return out.detach(), torch.as_tensor(loss).detach(), target, out, loss, parameters


def grads(out, loss, target, parameters):
    whole = (out * target).sum() + (
        loss.sum() if isinstance(loss, torch.Tensor) and loss.requires_grad else 0
    )
    return torch.autograd.grad(whole, parameters, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("gate", [*GATES, *SCORED])
def test_padded_is_unpadded_to_the_bit(gate, side):
    padded = layer(SCORED.get(gate) or GATES[gate])
    plain, valid = copy.deepcopy(padded), mask(side)
    x = torch.randn(B, S, D, dtype=torch.float64)
    monitors = balance.watch(padded), balance.watch(plain)
    ours, our_loss, *_, our_out, loss, parameters = numbers(padded, x, valid)
    theirs, their_loss, target, their_out, their_total, their_parameters = numbers(plain, x[valid])
    assert torch.equal(ours[valid], theirs)
    assert not ours[~valid].any()
    assert torch.equal(our_loss, their_loss)
    wide = torch.zeros(B, S, D, dtype=torch.float64)
    wide[valid] = target
    our_grads = grads(our_out, loss, wide, parameters)
    their_grads = grads(their_out, their_total, target, their_parameters)
    assert torch.equal(our_grads[0][valid], their_grads[0])
    assert not our_grads[0][~valid].any()
    for a, b in zip(our_grads[1:], their_grads[1:], strict=True):
        assert torch.equal(a, b)
    assert monitors[0].collect() == monitors[1].collect()
    if hasattr(padded.gate, "pending_load"):
        assert torch.equal(padded.gate.pending_load, plain.gate.pending_load)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padded_is_unpadded_on_every_instruction_set(isa, dtype):
    """Experts with more rows and with fewer than the few that the kernels multiply another way."""
    torch.manual_seed(0)
    module = FMoETransformerMLP(8, 32, 24, activation="swiglu", gate="softmax", shared_expert_hidden=8).to(
        dtype
    )
    x, valid = torch.randn(4, 16, 32).to(dtype), torch.arange(64).view(4, 16) % 5 > 0
    inputs = x.clone().requires_grad_(), x[valid].requires_grad_()
    padded, plain = module(inputs[0], valid), module(inputs[1])
    assert torch.equal(padded[valid], plain) and not padded[~valid].any()
    target = torch.randn(plain.shape).to(dtype)
    parameters = [*module.parameters()]
    ours = torch.autograd.grad(padded[valid], [inputs[0], *parameters], target)
    theirs = torch.autograd.grad(plain, [inputs[1], *parameters], target)
    assert torch.equal(ours[0][valid], theirs[0]) and not ours[0][~valid].any()
    assert all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))


def test_padding_values_do_not_matter():
    module, valid = layer(SoftmaxGate), mask("right")
    x = torch.randn(B, S, D, dtype=torch.float64)
    expected = module(x, valid)
    x[~valid] = torch.nan
    assert torch.equal(module(x, valid), expected)


def test_context_reaches_every_layer_and_ends():
    torch.manual_seed(0)
    model = nn.Sequential(*(FMoETransformerMLP(E, D, 5, gate=SoftmaxGate) for _ in range(2))).double()
    valid, x = mask("left").long(), torch.randn(B, S, D, dtype=torch.float64)
    with valid_tokens(valid):
        ours = model(x)
    assert torch.equal(ours[valid.bool()], model(x[valid.bool()]))
    assert model(x)[~valid.bool()].any()
    with valid_tokens(torch.zeros(B, S)):
        assert not model(x).any(), "nothing but padding"
    with valid_tokens(None):
        assert model(x).all()


def test_masked_tokens_with_padding_among_them():
    torch.manual_seed(0)
    filling = torch.tensor([1, 0, 1, 0])
    module = FMoE(E, D, gate=SoftmaxGate, expert=lambda d: nn.Linear(d, d), mask=filling, mask_dict={1: 7.0})
    valid, x = torch.tensor([True, True, False, False]), torch.randn(4, D)
    out = module(x, valid)
    torch.testing.assert_close(out[0], torch.full((D,), 7.0))
    assert not out[2:].any()


def test_wrong_masks_are_one_clear_error():
    module, x = layer(SoftmaxGate), torch.randn(B, S, D, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"have 5 entries but the input has 21 tokens"):
        module(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"additive attention mask is valid = mask == 0"):
        module(x, torch.full((B, S), -1e9))
    with (
        pytest.raises(ValueError, match=r"have 20 entries but the input has 21 tokens"),
        packed_sequences(torch.tensor([0, 20])),
    ):
        module(x)
    for wrong in ([0, 4, 2], [0], 21):
        with pytest.raises(ValueError, match="must rise from 0"), packed_sequences(torch.tensor(wrong)):
            pass


@pytest.mark.parametrize("gate", [SoftmaxGate, SigmoidGate])
def test_packed_sequences_have_the_loss_of_each_alone(gate):
    module = layer(partial(gate, balance_loss="sequence", seq_len=1, z_weight=0.1))
    x = torch.randn(sum(LENGTHS), D, dtype=torch.float64)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    with packed_sequences(ends.int()):
        module(x)
    ours = total_loss(module)
    alone = []
    for part in x.split(LENGTHS):
        module.gate.seq_len = len(part)
        module.gate.z_weight = 0.0
        module(part)
        alone.append(total_loss(module))
    expected = torch.stack(alone).mean() + 0.1 * z_loss(module.gate.logits(x))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected, module.gate.gate.weight)
    torch.testing.assert_close(
        torch.autograd.grad(ours, module.gate.gate.weight), wanted, rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_sequences_have_the_loss_of_packed_ones(side):
    module, valid = layer(partial(SoftmaxGate, balance_loss="sequence", seq_len=S)), mask(side)
    x = torch.randn(B, S, D, dtype=torch.float64)
    module(x, valid)
    ours = total_loss(module)
    with packed_sequences(torch.tensor([0, *LENGTHS]).cumsum(0)):
        module(x[valid])
    assert torch.equal(ours, total_loss(module))


def test_sequences_without_tokens_count_for_nothing():
    scores = torch.rand(5, E, dtype=torch.float64).softmax(-1)
    topk_idx = torch.tensor([[0], [1], [0], [-1], [3]])
    with_gap = sequence_balance_loss(scores, topk_idx, sequences=torch.tensor([0, 0, 2, 2, 2]))
    parts = [sequence_balance_loss(scores[a:b], topk_idx[a:b], b - a) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(with_gap, torch.stack(parts).mean(), rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="slice_group cuts"):
        sequence_balance_loss(scores, topk_idx, sequences=torch.tensor([0, 0]))
