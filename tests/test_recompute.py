"""Activation checkpointing: the second forward has the choices of the first, and nothing is counted twice."""

import copy
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fmoe_ext import FMoETransformerMLP, RoutingReplay, balance, valid_tokens
from fmoe_ext.gates import GATES, SigmoidGate, SoftmaxGate, all_forwards_first, total_loss

D, E, T = 6, 4, 24
SCORED = {
    "capacity": partial(SoftmaxGate, capacity_factor=0.7, jitter=0.3),
    "groups": partial(SigmoidGate, num_groups=2, topk_groups=1),
    "groups in python": partial(SigmoidGate, num_groups=2, topk_groups=1, group_best=1),
}


class Block(nn.Module):
    """x + moe(x + drift): drift stands for what makes the second forward's input another."""

    def __init__(self, gate):
        super().__init__()
        torch.manual_seed(0)
        self.moe = FMoETransformerMLP(E, D, 5, gate=gate).double()
        self.drift = torch.zeros(D, dtype=torch.float64)
        self.chosen = []
        self.moe.gate_hook = lambda topk_idx, *_: self.chosen.append(topk_idx.clone())

    def forward(self, x):
        return x + self.moe(x + self.drift)


def tokens(seed=1):
    return torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(block, x, use_reentrant=None, drift=0.0):
    """Gradients of input and parameters; without use_reentrant no checkpoint."""
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    out = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
    block.drift += drift
    torch.manual_seed(77)
    out.square().sum().backward()
    block.drift.zero_()
    return [x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in block.parameters())]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("gate", [*GATES, *SCORED])
def test_gradients_are_those_without_a_checkpoint(gate, use_reentrant):
    block = Block(SCORED.get(gate) or GATES[gate])
    plain = copy.deepcopy(block)
    plain.moe.gate_hook = None
    ours, theirs = step(block, tokens(), use_reentrant), step(plain, tokens())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    first, second = block.chosen
    assert torch.equal(first, second)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("gate", [*GATES, *SCORED])
def test_another_input_has_the_same_choices(gate, use_reentrant):
    block = Block(SCORED.get(gate) or GATES[gate])
    step(block, tokens(), use_reentrant, drift=0.5)
    first, second = block.chosen
    assert torch.equal(first, second)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inputs_that_have_overflowed_find_their_own_choices(use_reentrant, number):
    """As before a gradient scaler skips a step."""
    block, batches = Block(SoftmaxGate), [tokens(1), tokens(2)]
    for x in batches:
        x[0] = number
    outs = [checkpoint(block, x.requires_grad_(), use_reentrant=use_reentrant) for x in batches]
    block.drift += 0.5
    for out in outs:
        out.sum().backward()
    assert torch.equal(block.chosen[2], block.chosen[0]) and torch.equal(block.chosen[3], block.chosen[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_without_the_pinning_drift_changes_choices(use_reentrant):
    block = Block(SoftmaxGate)
    block.moe._forwards.find = lambda moe_inp: None
    try:
        step(block, tokens(), use_reentrant, drift=0.5)
    except torch.utils.checkpoint.CheckpointError:
        return
    first, second = block.chosen
    assert not torch.equal(first, second), "the other tests would show nothing"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_microbatches_in_any_order_find_their_own_choices(use_reentrant):
    block = Block(partial(SoftmaxGate, jitter=0.3))
    outs = [
        checkpoint(block, tokens(seed).requires_grad_(), use_reentrant=use_reentrant) for seed in range(4)
    ]
    first = list(block.chosen)
    block.drift += 0.05
    for i in (2, 0, 3, 1):
        block.chosen.clear()
        outs[i].sum().backward()
        assert torch.equal(block.chosen[0], first[i])
    assert all(forward.is_done for forward in block.moe._forwards._without)
    outs.clear()
    assert all(ref() is None for ref in block.moe._forwards._with_graph), "choices die with their graph"


def test_backward_in_two_parts_repeats_its_own_forward_twice():
    """As zero-bubble schedules do. The second repetition had taken the choices of another microbatch, in silence."""
    block = Block("softmax")
    weights = list(block.parameters())
    batches = [tokens(seed).requires_grad_() for seed in (1, 2, 3)]
    outs = [checkpoint(block, x, use_reentrant=False).square().sum() for x in batches]
    for x, out in zip(batches, outs, strict=True):
        of_input = torch.autograd.grad(out, x, retain_graph=True)
        of_weights = torch.autograd.grad(out, weights)
        expected = torch.autograd.grad(block(x).square().sum(), [x, *weights])
        torch.testing.assert_close((*of_input, *of_weights), expected, rtol=1e-12, atol=1e-12)


def gradients(block, forward, batches, order):
    """Gradients of the parameters after the backwards of forward(block, x) for all batches, one after the other."""
    outs = []
    for seed, x in enumerate(batches):
        torch.manual_seed(seed)
        outs.append(forward(block, x.clone().requires_grad_()))
    for i in order:
        outs[i].square().sum().backward()
    grads = [p.grad for p in block.parameters()]
    block.zero_grad()
    return grads


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_input_twice_with_noise(use_reentrant, order):
    """As consistency losses have it. Both repetitions had taken the other forward's choices, in silence."""
    block, batches = Block(partial(SoftmaxGate, jitter=0.5)), [tokens(), tokens()]
    ours = gradients(block, partial(checkpoint, use_reentrant=use_reentrant), batches, order)
    assert not torch.equal(*block.chosen[:2]), "noise has to matter"
    theirs = gradients(block, lambda layer, x: layer(x), batches, order)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_forward_without_a_record_is_not_taken_for_another():
    """In evaluation a reentrant checkpoint keeps nothing; its repetition had taken the choices of another batch."""
    block = Block(SoftmaxGate).eval()
    other = block(tokens(2))

    def forward(layer, x):
        return checkpoint(layer, x, use_reentrant=True)

    ours = gradients(block, forward, [tokens()], (0,))
    del other
    theirs = gradients(block, lambda layer, x: layer(x), [tokens()], (0,))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_more_forwards_under_way_than_records_warn_once(recwarn):
    """The first two of 66 choose anew, in silence before."""
    block = Block(partial(SoftmaxGate, jitter=0.3))
    outs = [checkpoint(block, tokens(seed).requires_grad_(), use_reentrant=True) for seed in range(66)]
    first = list(block.chosen)
    block.chosen.clear()
    block.drift += 0.3
    for out in reversed(outs):
        out.sum().backward()
    again = block.chosen[::-1]
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [False] * 2 + [True] * 64
    (said,) = recwarn
    assert "a layer keeps the last 64 of each thread" in str(said.message)


def test_forwards_under_no_grad_that_nothing_repeats_do_not_warn(recwarn):
    block = Block(SoftmaxGate)
    with torch.no_grad():
        for seed in range(66):
            block(tokens(seed))
    for use_reentrant in (False, True):
        step(block, tokens(), use_reentrant)
    assert not recwarn.list


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_checkpoint_in_a_checkpoint_gives_the_same_gradients(inner, outer):
    """Its repetitions had found the forwards that only looked, with noise of their own."""
    block = Block(partial(SoftmaxGate, jitter=0.5))

    def forward(layer, x):
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(99)
            layer(x)
            layer(x)
        return checkpoint(partial(checkpoint, layer, use_reentrant=inner), x, use_reentrant=outer)

    ours = gradients(block, forward, [tokens(), tokens(2)], (1, 0))
    theirs = gradients(block, lambda layer, x: layer(x), [tokens(), tokens(2)], (1, 0))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


KINDS = {
    "none": lambda layer, x: layer(x),
    "plain": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "nested": lambda layer, x: checkpoint(KINDS["reentrant"], layer, x, use_reentrant=False),
}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from([*KINDS]), st.booleans()), min_size=1, max_size=4),
    st.sampled_from(["capacity", "groups"]),
    st.permutations(range(4)),
)
def test_any_checkpoints_in_any_order(forwards, gate, order):
    """Each forward of its kind, on a batch of its own or the first one, with or without a look before it."""
    order = [i for i in order if i < len(forwards)]
    block, kinds = Block(SCORED[gate]), iter(forwards)

    def forward(layer, x):
        kind, looks = next(kinds)
        if looks:
            with torch.no_grad(), torch.random.fork_rng():
                torch.manual_seed(99)
                layer(x)
        return KINDS[kind](layer, x)

    batches = [tokens(seed % 3) for seed in range(len(forwards))]
    ours = gradients(block, forward, batches, order)
    theirs = gradients(block, KINDS["none"], batches, order)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_counted_once(use_reentrant):
    block = Block(SigmoidGate)
    monitor, replay = balance.watch(block), RoutingReplay(block)
    with replay.record():
        step(block, tokens(), use_reentrant)
    layer = monitor.collect()["layers"]["moe.gate"]
    assert sum(layer["tokens_per_expert"]) == T * 2
    assert int(block.moe.gate.pending_load.sum()) == T * 2
    assert [len(choices) for choices in replay.choices.values()] == [1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_played_choices_are_repeated(use_reentrant):
    block = Block(SoftmaxGate)
    replay = RoutingReplay(block)
    with replay.record():
        block(tokens(1))
        block(tokens(2))
    played = [choices.kept for choices in replay.choices["moe.gate"]]
    block.chosen.clear()
    with replay.play():
        out = checkpoint(block, tokens(3).requires_grad_(), use_reentrant=use_reentrant)
        out.sum().backward()
        block(tokens(3))
    for ours, expected in zip(block.chosen, (played[0], played[0], played[1]), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_padding_of_the_original_is_that_of_the_repetition(use_reentrant, training):
    block = Block(SoftmaxGate).train(training)
    plain = copy.deepcopy(block)
    valid, x = torch.arange(T) % 3 > 0, tokens().requires_grad_()
    with valid_tokens(valid):
        out = checkpoint(block, x, use_reentrant=use_reentrant)
    out[valid].square().sum().backward()
    assert torch.equal(*block.chosen), "padding has no choices, nor in the repetition"
    expected = x.detach()[valid].requires_grad_()
    plain(expected).square().sum().backward()
    torch.testing.assert_close(x.grad[valid], expected.grad, rtol=1e-12, atol=1e-13)
    for p, q in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13)


def test_loss_inside_a_reentrant_checkpoint_has_its_gradient():
    block = Block(partial(SoftmaxGate, balance_loss="global"))
    plain = copy.deepcopy(block)

    def with_loss(x, module=block):
        return module(x).square().sum() + 0.5 * total_loss(module)

    checkpoint(with_loss, tokens().requires_grad_(), use_reentrant=True).backward()
    with_loss(tokens(), plain).backward()
    for p, q in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13)


def test_copies_and_pickles_begin_anew():
    block = Block(SoftmaxGate)
    block.moe.gate_hook = None
    out = checkpoint(block, tokens(), use_reentrant=False)
    other = copy.deepcopy(block)
    assert torch.equal(other(tokens()), out)
    assert len(block.moe._forwards._with_graph) == 1


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_forward_that_nothing_can_repeat_keeps_no_record(gate):
    block = Block(gate)
    block(tokens())
    with torch.no_grad():
        block.eval()(tokens())
    assert not block.moe._forwards._with_graph and not block.moe._forwards._without
    block.train()
    kept = [checkpoint(block, tokens(), use_reentrant=False)]
    assert len(block.moe._forwards._with_graph) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        kept.append(block(tokens(2)))
    assert len(block.moe._forwards._with_graph) == 2


def test_choices_are_counted_once_a_forward():
    """For the balance loss, the bias, telemetry: one operator, as long as none is dropped."""
    block = Block(partial(SigmoidGate, bias_update_speed=1e-3))
    balance.watch(block)
    calls = CountCalls()
    with calls:
        block(tokens())
    assert calls.num == 1


class CountCalls(TorchDispatchMode):
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.fmoe_ext.count_tokens.default
        return func(*args, **(kwargs or {}))


def selective(*saved):
    """Arguments of a checkpoint that keeps the results of these operators."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}


OPERATORS = torch.ops.fmoe_ext
SAVED = [(), (OPERATORS.topk_gate.default,), (OPERATORS.expert_mlp.default, OPERATORS.sort_tokens.default)]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("saved", SAVED, ids=["nothing", "choices", "experts"])
@pytest.mark.parametrize("gate", [*GATES, *SCORED])
def test_selective_checkpoint_has_the_gradients_of_none(gate, saved, is_pipelined, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining", raising=False)
    if is_pipelined:  # products are then several nodes elsewhere
        monkeypatch.setitem(sys.modules, "torch.distributed.pipelining", torch)
    block = Block(SCORED.get(gate) or GATES[gate])
    plain = copy.deepcopy(block)

    def train(block, **options):
        x = tokens().requires_grad_()
        torch.manual_seed(2)
        out = checkpoint(block, x, **options) if options else block(x)
        torch.manual_seed(77)
        (out.square().sum() + total_loss(block)).backward()
        return [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]

    for ours, theirs in zip(train(block, **selective(*saved)), train(plain), strict=True):
        assert torch.equal(ours, theirs)
    for name, value in plain.state_dict().items():
        assert torch.equal(block.state_dict()[name], value), name


def test_selective_checkpoint_refuses_what_its_repetition_would_not_know():
    block, x = Block(GATES["softmax"]), tokens().requires_grad_()
    with valid_tokens(torch.arange(T) < 5), pytest.raises(RuntimeError, match="pass valid= to the layer"):
        checkpoint(block, x, **selective())
    with all_forwards_first(block), pytest.raises(RuntimeError, match="without context_fn"):
        checkpoint(block, x, **selective()).sum().backward()
