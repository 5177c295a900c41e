"""Decoded weights kept for the backward: decoded once a layer and step, within a bound, with the same bits."""

import gc
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fmoe_ext import frozen
from fmoe_ext.frozen import kept
from fmoe_ext.frozen.frozen_gemm import composed as gemm
from fmoe_ext.frozen.frozen_mlp import composed as mlp
from fmoe_ext.frozen.frozen_mlp import composed_backward as mlp_backward
from tests.ops.test_quantized import packed

NAMES = ("frozen_gemm", "frozen_mlp", "frozen_mlp_backward")
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
E, OUT, IN = 2, 64, 256
SIZE = E * OUT * IN * 4  # bytes of a copy in float32
CPU = torch.device("cpu")


@pytest.fixture
def decoded(monkeypatch):
    """As on CUDA: products decode in memory. The packed weights that were decoded, in order."""
    library = torch.library.Library("fmoe_ext", "IMPL")
    for name, kernel in zip(NAMES, (gemm, mlp, mlp_backward), strict=True):
        library.impl(name, kernel, "CPU", allow_override=True)
    calls = []

    def decode(weight, *packing):
        calls.append(weight.data_ptr())
        return frozen.Quantized.of_rows(weight, *packing[:4]).dequantize(packing[4])

    library.impl("_decode_packed", decode, "CPU")
    monkeypatch.setattr(kept, "KEPT", kept.KeptWeights(lambda device: 0))
    yield calls
    library._destroy()


def layer(seed=0):
    return packed("q4_k", E, OUT, IN, seed)


def step(weights, x=None):
    """Forward through each weight and backward; the gradient of x."""
    x = torch.ones(5, IN) if x is None else x
    x.requires_grad_()
    offs = torch.tensor([2, 5], dtype=torch.int32)
    loss = sum(frozen.frozen_gemm(x, weight, offs).square().sum() for weight in weights)
    return torch.autograd.grad(loss, x)[0]


def test_backward_takes_what_the_forward_decoded(decoded):
    weight = layer()
    expected = step([weight])
    assert len(decoded) == 2  # there and back: nothing is kept by default on a CPU
    frozen.keep_decoded(SIZE)
    decoded.clear()
    assert torch.equal(step([weight]), expected)
    assert len(decoded) == 1 and kept.KEPT.num_bytes(CPU) == 0


def test_kept_weights_past_the_bound_drop_the_oldest(decoded):
    """Of three layers two fit: the backward begins with the last, which are there."""
    frozen.keep_decoded(2 * SIZE)
    weights = [layer(seed) for seed in range(3)]
    step(weights)
    first, *rest = (weight.rows().data_ptr() for weight in weights)
    assert decoded == [first, *rest, first] and kept.KEPT.num_bytes(CPU) == 0
    frozen.keep_decoded(SIZE - 1)
    decoded.clear()
    step(weights[:1])
    assert len(decoded) == 2


def test_keep_decoded_with_a_smaller_bound_drops_at_once(decoded):
    frozen.keep_decoded(4 * SIZE)
    x = torch.ones(5, IN, requires_grad=True)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    alive = [frozen.frozen_gemm(x, weight, offs) for weight in (layer(0), layer(1))]
    assert kept.KEPT.num_bytes(CPU) == 2 * SIZE
    frozen.keep_decoded(SIZE)
    assert kept.KEPT.num_bytes(CPU) == SIZE
    frozen.keep_decoded(0)
    assert kept.KEPT.num_bytes(CPU) == 0 and alive[0].requires_grad
    with pytest.raises(ValueError, match="limit must be a number of bytes from 0 on, or None, but got -1"):
        frozen.keep_decoded(-1)


def test_by_default_a_quarter_of_what_is_free(decoded, monkeypatch):
    free = 8 * SIZE
    kept.KEPT._free_bytes = lambda device: free - kept.KEPT.num_bytes(device)
    x = torch.ones(5, IN, requires_grad=True)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    weights = [layer(seed) for seed in range(4)]
    outputs = []
    for number, weight in enumerate(weights, 1):
        outputs.append(frozen.frozen_gemm(x, weight, offs))
        assert kept.KEPT.num_bytes(CPU) == min(number, 2) * SIZE


def test_without_a_backward_nothing_is_kept(decoded):
    frozen.keep_decoded(4 * SIZE)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    frozen.frozen_gemm(torch.ones(5, IN), layer(), offs)
    with torch.no_grad():
        frozen.frozen_gemm(torch.ones(5, IN, requires_grad=True), layer(), offs)
    assert kept.KEPT.num_bytes(CPU) == 0 and len(decoded) == 2


def test_kept_weight_that_changed_or_died_has_no_copy(decoded):
    frozen.keep_decoded(4 * SIZE)
    weight, other = layer(0), layer(1)
    x = torch.ones(5, IN, requires_grad=True)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    before = frozen.frozen_gemm(x, weight, offs)
    weight.data.copy_(other.data)
    assert torch.equal(step([weight]), step([other]))
    # the ticket alone is saved as it is, as where hooks move large tensors to another memory
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() if t.numel() else t, lambda t: t):
        after = frozen.frozen_gemm(x, weight, offs)
    del before
    assert kept.KEPT.num_bytes(CPU) == SIZE and after.requires_grad
    del weight, other
    gc.collect()
    assert kept.KEPT.num_bytes(CPU) == 0


def test_graph_without_a_backward_takes_its_copy_along(decoded):
    frozen.keep_decoded(4 * SIZE)
    weight = layer()
    offs = torch.tensor([2, 5], dtype=torch.int32)
    y = frozen.frozen_gemm(torch.ones(5, IN, requires_grad=True), weight, offs)
    assert kept.KEPT.num_bytes(CPU) == SIZE
    del y
    assert kept.KEPT.num_bytes(CPU) == 0


@pytest.mark.parametrize("limit", [None, 2 * SIZE])
def test_graphs_that_end_while_copies_are_counted_or_dropped(decoded, limit):
    """A garbage collection may end a graph at any line: a forward failed, "mutated during iteration"."""
    frozen.keep_decoded(32 * SIZE)
    x = torch.ones(5, IN, requires_grad=True)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    outputs = [frozen.frozen_gemm(x, layer(seed), offs) for seed in range(32)]

    def end_one(frame, event, arg):
        if frame.f_code.co_filename == kept.__file__ and outputs:
            outputs.pop()
        return end_one

    before = sys.gettrace()
    sys.settrace(end_one)
    try:
        if limit is None:
            kept.KEPT.num_bytes(CPU)
        else:
            frozen.keep_decoded(limit)
    finally:
        sys.settrace(before)
    assert len(outputs) < 30
    assert kept.KEPT.num_bytes(CPU) == (
        len(outputs) * SIZE if limit is None else min(len(outputs) * SIZE, limit)
    )


def test_copy_of_another_thread_leaves_this_one_alone(decoded, monkeypatch):
    """Both decode at once. The end of the graph whose copy was replaced dropped the other one's."""
    frozen.keep_decoded(4 * SIZE)
    weight = layer()
    offs = torch.tensor([2, 5], dtype=torch.int32)
    ops, others = torch.ops.fmoe_ext._decode_packed, []

    def forward():
        return frozen.frozen_gemm(torch.ones(5, IN, requires_grad=True), weight, offs)

    def while_another_decodes(*arguments):
        monkeypatch.setattr(torch.ops.fmoe_ext, "_decode_packed", ops)
        thread = threading.Thread(target=lambda: others.append(forward()))
        thread.start()
        thread.join()
        return ops(*arguments)

    monkeypatch.setattr(torch.ops.fmoe_ext, "_decode_packed", while_another_decodes)
    y = forward()
    assert len(others) == 1 and len(decoded) == 2 and kept.KEPT.num_bytes(CPU) == SIZE
    others.clear()
    assert kept.KEPT.num_bytes(CPU) == SIZE
    y.sum().backward()
    assert len(decoded) == 2 and kept.KEPT.num_bytes(CPU) == 0


def test_slice_of_a_weight_is_decoded_by_itself(decoded):
    """Both begin at one address."""
    frozen.keep_decoded(4 * SIZE)
    weight = packed("nf4", E, OUT, IN, 0)
    first = weight.map(lambda t: t[:1])
    x = torch.ones(5, IN, requires_grad=True)
    y = frozen.frozen_gemm(x, weight, torch.tensor([5, 5], dtype=torch.int32))
    assert kept.KEPT.num_bytes(CPU) == SIZE
    assert torch.equal(frozen.frozen_gemm(x, first, torch.tensor([5], dtype=torch.int32)), y)
    assert len(decoded) == 2 and kept.KEPT.num_bytes(CPU) == SIZE


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_keep_the_copies_of_one_at_a_time(decoded, reentrant):
    weights = [packed("q8_0", E, IN, IN, seed) for seed in range(3)]
    offs = torch.tensor([2, 5], dtype=torch.int32)
    copy = weights[0].dequantize().nbytes
    frozen.keep_decoded(4 * copy)
    held = []

    def run(x, weight):
        y = frozen.frozen_gemm(x, weight, offs)
        held.append(kept.KEPT.num_bytes(CPU))
        return y.sin()  # saves y: until then a repeated forward goes on

    x = torch.ones(5, IN, requires_grad=True)
    y = x
    for weight in weights:
        y = checkpoint(run, y, weight, use_reentrant=reentrant)
    y.sum().backward()
    plain = x.detach().requires_grad_()
    y = plain
    for weight in weights:
        y = run(y, weight)
    forwards = [weight.rows().data_ptr() for weight in weights]
    assert decoded == [*forwards, *forwards[::-1], *forwards]  # twice with a checkpoint, once without
    assert held == [0, 0, 0, copy, copy, copy, copy, 2 * copy, 3 * copy]
    y.sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("mlp", [True, False])
def test_compiled_forward_keeps_nothing(decoded, mlp):
    frozen.keep_decoded(16 * SIZE)
    w1, w2 = packed("q4_k", 1, 256, IN, 0), packed("q8_0", 1, IN, 256, 1)
    row_idx = torch.arange(4, dtype=torch.int32)
    offs = torch.tensor([4], dtype=torch.int32)

    def forward(x):
        if mlp:
            return frozen.frozen_mlp(x, row_idx, row_idx[:, None], offs, w1, None, w2, None)
        return frozen.frozen_gemm(x, w1, offs)

    x = torch.ones(4, IN, requires_grad=True)
    y = forward(x)
    assert kept.KEPT.num_bytes(CPU) > 0
    del y
    y = torch.compile(forward, backend="aot_eager")(x)
    assert y.requires_grad and kept.KEPT.num_bytes(CPU) == 0


def test_kept_weight_under_other_scales_is_decoded_again(decoded):
    """The same codes: under scales of another tensor, and under scales that were written to."""
    frozen.keep_decoded(4 * SIZE)
    weight = packed("nf4", E, OUT, IN, 0)
    x = torch.ones(5, IN, requires_grad=True)
    offs = torch.tensor([2, 5], dtype=torch.int32)
    first = frozen.frozen_gemm(x, weight, offs)
    doubled = frozen.frozen_gemm(x, replace(weight, scale=weight.scale * 2), offs)
    assert torch.equal(doubled, first * 2)
    assert kept.KEPT.num_bytes(CPU) == 2 * SIZE
    weight.scale.mul_(4)
    assert torch.equal(frozen.frozen_gemm(x, weight, offs), first * 4)


def test_weight_of_inference_mode_is_decoded_and_not_kept(decoded):
    frozen.keep_decoded(4 * SIZE)
    with torch.inference_mode():
        weight = packed("nf4", E, OUT, IN, 0)
        y = frozen.frozen_gemm(torch.ones(5, IN), weight, torch.tensor([2, 5], dtype=torch.int32))
    assert len(decoded) == 1 and kept.KEPT.num_bytes(CPU) == 0
    rows = weight.dequantize()[[0, 0, 1, 1, 1]]
    torch.testing.assert_close(y, rows.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("save", [True, False])
def test_frozen_mlp(decoded, save):
    frozen.keep_decoded(16 * SIZE)
    w1, w2 = packed("q4_k", E, 2 * 256, IN, 0), packed("q8_0", E, IN, 256, 1)
    x = torch.randn(4, IN, generator=torch.Generator().manual_seed(0)).requires_grad_(save)
    row_idx, inverse = torch.arange(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32)[:, None]
    arguments = (
        x,
        row_idx,
        inverse,
        torch.tensor([1, 4], dtype=torch.int32),
        w1,
        None,
        w2,
        None,
        None,
        "swiglu",
    )
    y = frozen.frozen_mlp(*arguments)
    assert (kept.KEPT.num_bytes(CPU) > 0) == save
    if save:
        y.square().sum().backward()
        truth = x.detach().clone().requires_grad_()
        frozen.frozen_mlp_ref(truth, *arguments[1:]).square().sum().backward()
        torch.testing.assert_close(x.grad, truth.grad, rtol=1e-4, atol=1e-4)
    assert len(decoded) == 2 and kept.KEPT.num_bytes(CPU) == 0
