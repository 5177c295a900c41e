"""Hooks on, wrappers around and other tensors in the modules that hold experts' parameters are honoured or refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fmoe_ext import FMoETransformerMLP

T, E, D, H = 11, 4, 6, 5
ACTIVATIONS = ["swiglu", "gelu", torch.tanh]


def make(activation="swiglu"):
    torch.manual_seed(0)
    return FMoETransformerMLP(E, D, H, activation).double()


def results(layer):
    x = torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_hooks_fire_before_weights_are_read(activation):
    """As offloading does it: the weights come in a hook before the module's call, and go in one after it."""
    expected = results(make(activation))
    layer, copied = make(activation), make(activation)
    calls = []
    for name in ("htoh4", "h4toh"):
        linear = getattr(layer.experts, name)
        whole = linear.weight.detach().clone()
        with torch.no_grad():
            linear.weight.fill_(torch.nan)

        def bring(module, args, whole=whole, name=name):
            calls.append(name)
            with torch.no_grad():
                module.weight.copy_(whole)

        linear.register_forward_pre_hook(bring)
    assert layer.experts.must_be_called and copy.deepcopy(layer).experts.must_be_called
    assert_same(results(layer), expected)
    assert calls == ["htoh4", "h4toh"]
    handle = copied.experts.h4toh.register_full_backward_hook(lambda *_: calls.append("backward"))
    assert_same(results(copied), expected)
    assert calls[2:] == ["backward"]
    handle.remove()
    assert not copied.experts.must_be_called


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_instance_forward_and_wrapper_are_called(activation):
    class Doubled(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, rows, counts):
            return 2 * self.base(rows, counts)

    plain, wrapped, patched = make(activation), make(activation), make(activation)
    wrapped.experts.h4toh = Doubled(wrapped.experts.h4toh)
    own = patched.experts.h4toh.forward
    patched.experts.h4toh.forward = lambda rows, counts: 2 * own(rows, counts)
    expected = 2 * results(plain)[0]
    for layer in (wrapped, patched):
        torch.testing.assert_close(results(layer)[0], expected, rtol=1e-12, atol=1e-14)


def test_parametrizations_are_read():
    class Shifted(nn.Module):
        def forward(self, weight):
            return weight + 1

    plain, layer = make(), make()
    with torch.no_grad():
        plain.experts.htoh4.weight += 1
    parametrize.register_parametrization(layer.experts.htoh4, "weight", Shifted())
    torch.testing.assert_close(results(layer)[0], results(plain)[0], rtol=1e-12, atol=1e-14)


def test_hooked_experts_cannot_be_divided_or_shadowed():
    layer = make()
    layer.experts.htoh4.register_forward_hook(lambda *_: None)
    kind = layer.expert_kind
    assert not kind.can_be_divided and not kind.can_be_shadowed
    with pytest.raises(RuntimeError, match=r"overlap_degree=2 .*without hooks"):
        kind.divided([2, 4])
    with pytest.raises(RuntimeError, match="cannot be shadowed"):
        kind.fetched(None, None)


class Quantized(torch.Tensor):
    """A tensor subclass as quantization libraries and DTensor make them."""

    def __tensor_flatten__(self):
        return [], None


def test_tensor_subclasses_are_refused():
    layer = make()
    layer.experts.h4toh.weight = nn.Parameter(layer.experts.h4toh.weight.detach().as_subclass(Quantized))
    with pytest.raises(
        TypeError, match=r"weight is a .*, and experts compute with plain tensors: leave FMoELinear"
    ):
        layer(torch.zeros(2, D, dtype=torch.float64))
    with pytest.raises(TypeError, match="plain tensors"):
        layer.experts.h4toh(torch.zeros(2, H, dtype=torch.float64), torch.tensor([2, 0, 0, 0]))
