"""valid_tokens(), packed_sequences() and token_ids() around and inside of compiled programs."""

import threading
from functools import partial

import pytest
import torch

from fmoe_ext import FMoETransformerMLP, HashGate, SoftmaxGate, valid_tokens
from fmoe_ext.gates import total_loss
from fmoe_ext.tokens import Batch, enter, leave, packed_sequences, token_ids, with_valid

T, D = 8, 6
SEQUENCE = partial(SoftmaxGate, balance_loss="sequence", seq_len=4)
MASKS = [torch.arange(T) % 4 < n for n in (3, 1, 2)]


def make(gate="softmax"):
    torch.manual_seed(0)
    return FMoETransformerMLP(4, D, 5, gate=gate).double()


def results(layer, call, around=lambda _: valid_tokens(None)):
    """Output, loss and gradients of calls in three blocks."""
    torch.manual_seed(1)
    x = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
    seen = []
    for mask in MASKS:
        layer.zero_grad()
        with around(mask):
            y = call(x, mask)
        (y.square().sum() + total_loss(layer)).backward()
        seen += [y.detach(), total_loss(layer).detach(), x.grad.clone(), layer.gate.gate.weight.grad.clone()]
    return seen


def inside(layer):
    def call(x, mask):
        with valid_tokens(mask):
            return layer(x)

    return call


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("gate", ["softmax", pytest.param(SEQUENCE, marks=pytest.mark.long)])
def test_padding_in_a_compiled_layer_is_that_of_eager(gate):
    layer = make(gate)
    expected = results(layer, inside(layer))
    assert_equal(results(layer, compiled(lambda x, mask: layer(x, mask))), expected)
    assert_equal(results(layer, compiled(inside(layer))), expected)
    assert_equal(results(layer, compiled(lambda x, _: layer(x)), valid_tokens), expected)
    plain = compiled(lambda x, _: layer(x))
    assert_equal(results(layer, plain), results(layer, lambda x, _: layer(x)))
    assert_equal(results(layer, plain, valid_tokens), expected)


def test_sequences_and_ids_reach_a_compiled_layer():
    layer = make(SEQUENCE)
    ends = torch.tensor([0, 2, T])
    call = lambda x, _: layer(x)  # noqa: E731
    around = lambda _: packed_sequences(ends)  # noqa: E731
    assert_equal(results(layer, compiled(call), around), results(layer, call, around))
    hashed = FMoETransformerMLP(4, D, 5, gate=partial(HashGate, vocab_size=20))
    step, x = compiled(hashed), torch.randn(T, D)
    for ids in (torch.arange(T), torch.arange(T) + 5):
        with token_ids(ids):
            assert torch.equal(step(x), hashed(x))


def test_block_of_another_thread_is_refused():
    """It had been taken for that of this thread, or the layer had run without a graph."""
    layer = make()
    step, x, errors = compiled(layer), torch.randn(T, D, dtype=torch.float64), []

    def other():
        try:
            step(x)
        except RuntimeError as error:
            errors.append(str(error))

    with valid_tokens(MASKS[0]):
        step(x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "another thread is inside valid_tokens()" in errors[0]


def test_block_that_a_graph_has_entered_reaches_a_layer_without_one():
    """As past torch's recompile_limit: hooks in graphs, layers not. Their padding reached gates and experts."""
    layer, x, open_blocks, elsewhere = make(), torch.randn(T, D, dtype=torch.float64), [], []
    compiled(lambda mask: open_blocks.append(enter(with_valid(Batch(), mask))))(MASKS[0])
    try:
        inside_block = layer(x)
        thread = threading.Thread(target=lambda: elsewhere.append(layer(x)))  # has no block
        thread.start()
        thread.join()
        with valid_tokens(MASKS[2]):
            inside_another = layer(x)
    finally:
        compiled(lambda: leave(open_blocks.pop()))()
    assert inside_block.equal(layer(x, valid=MASKS[0])) and inside_another.equal(layer(x, valid=MASKS[2]))
    assert elsewhere[0].equal(layer(x))
