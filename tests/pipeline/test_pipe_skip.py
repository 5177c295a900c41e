import copy
import pickle

import pytest
import torch
from torch import nn

from fmoe_ext.compat.fairscale import Namespace, Pipe, pop, skippable, stash, verify_skippables


@skippable(stash=["skip"])
class Keep(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Take(nn.Module):
    def forward(self, x):
        kept = yield pop("skip")
        return x * x + kept


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[3], [1, 1, 1], [2, 1]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_values_and_gradients(balance, checkpoint, chunks):
    pipe = Pipe(nn.Sequential(Keep(), nn.Tanh(), Take()), balance, chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    out = pipe(x)
    expected = (2 * x).tanh().square() + x
    assert torch.equal(out, expected)
    (mine,) = torch.autograd.grad(out.sum(), x)
    (truth,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(mine, truth, rtol=1e-12, atol=0)


def test_without_pipe():
    x = torch.arange(3.0)
    assert torch.equal(nn.Sequential(Keep(), nn.Identity(), Take())(x), 4 * x * x + x)


def test_names_isolated_by_namespace():
    outer, inner = Namespace(), Namespace()
    layers = Keep().isolate(outer), Keep().isolate(inner), Take().isolate(inner), Take().isolate(outer)
    x = torch.ones(4)
    expected = ((2 * 2) ** 2 + 2.0) ** 2 + 1
    assert Pipe(nn.Sequential(*layers), [1, 1, 1, 1], chunks=2)(x).tolist() == [expected] * 4


def test_none_can_be_stashed():
    @skippable(stash=["nothing"])
    class Stash(nn.Module):
        def forward(self, x):
            yield stash("nothing", None)
            return x

    @skippable(pop=["nothing"])
    class Pop(nn.Module):
        def forward(self, x):
            nothing = yield pop("nothing")
            assert nothing is None
            return x + 1

    assert Pipe(nn.Sequential(Stash(), Pop()), [1, 1])(torch.zeros(1)) == 1


@pytest.mark.parametrize(
    "layers, text",
    [
        ([Keep, nn.Identity], "no module declared 'skip' as poppable but stashed"),
        ([nn.Identity, Take], "'1' declared 'skip' as poppable but it was not stashed"),
        ([Take, Keep], "'0' declared 'skip' as poppable but it was not stashed"),
        ([Keep, Take, Take], "'2' redeclared 'skip' as poppable but not isolated"),
        ([Keep, Keep, Take], "'1' redeclared 'skip' as stashable but not isolated"),
    ],
)
def test_unmatched_pairs(layers, text):
    module = nn.Sequential(*(layer() for layer in layers))
    with pytest.raises(TypeError, match=text):
        verify_skippables(module)
    with pytest.raises(TypeError, match=text):
        Pipe(module, [len(module)])


def faulty(commands, **names):
    @skippable(**names)
    class Faulty(nn.Module):
        def forward(self, x):
            yield from commands
            return x

    return Faulty()


@pytest.mark.parametrize(
    "layer, error, text",
    [
        (faulty([stash("a", None)]), RuntimeError, "'a' has not been declared as stashable"),
        (faulty([pop("a")]), RuntimeError, "'a' has not been declared as poppable"),
        (faulty([pop("a")], pop=["a"]), RuntimeError, "'a' has not been stashed"),
        (faulty([], stash=["a", "b"]), RuntimeError, "'a', 'b' must be stashed but have not"),
        (faulty(["a"]), TypeError, "yields stash"),
    ],
)
def test_wrong_commands(layer, error, text):
    with pytest.raises(error, match=text):
        layer(torch.ones(1))


def test_copied_namespace_is_the_same_namespace():
    """Also through pickle, and for layers that are copied one by one."""
    namespace, other = Namespace(), Namespace()
    for same in (copy.copy(namespace), copy.deepcopy(namespace), pickle.loads(pickle.dumps(namespace))):
        assert same == namespace and hash(same) == hash(namespace) and same != other
    assert (namespace < other) != (other < namespace)
    layers = copy.deepcopy(Keep().isolate(namespace)), copy.deepcopy(Take().isolate(namespace))
    verify_skippables(nn.Sequential(*layers))
    assert Pipe(nn.Sequential(*layers), [1, 1])(torch.ones(2)).tolist() == [5, 5]
