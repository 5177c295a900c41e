"""Pipe: the same numbers as the module it was made of, FairScale's interface and errors."""

import importlib
from collections import OrderedDict
from copy import deepcopy

import pytest
import torch
from torch import nn

from fmoe_ext import FMoETransformerMLP, SoftmaxGate, gates
from fmoe_ext.compat import fairscale
from fmoe_ext.compat.fairscale import BalanceError, NoChunk, Pipe

CPU = torch.device("cpu")
MODES = ("always", "except_last", "never")


class Residual(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


def experts(seed=0):
    torch.manual_seed(seed)
    return FMoETransformerMLP(4, 6, 8, "swiglu", top_k=2, gate=SoftmaxGate)


def model(dtype=torch.float64):
    torch.manual_seed(1)
    layers = nn.Linear(5, 6), Residual(experts()), nn.GELU(), experts(1), nn.Linear(6, 3)
    return nn.Sequential(*layers).to(dtype)


def grads(module):
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_gradients_are_those_of_the_module(chunks, checkpoint):
    plain = model()
    pipe = Pipe(deepcopy(plain), [2, 1, 2], chunks=chunks, checkpoint=checkpoint)
    x = torch.randn(7, 5, dtype=torch.float64)
    mine, truth = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = pipe(mine), plain(truth)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    out.square().mean().backward()
    expected.square().mean().backward()
    for ours, theirs in zip([mine.grad, *grads(pipe)], [truth.grad, *grads(plain)], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("checkpoint", MODES)
def test_balance_losses_of_the_microbatches_reach_the_gates(checkpoint):
    plain = model()
    pipe = Pipe(deepcopy(plain), [2, 3], chunks=3, checkpoint=checkpoint)
    x = torch.randn(8, 5, dtype=torch.float64)
    parts = x.chunk(3)
    expected = 0
    for part in parts:
        plain(part)
        expected = expected + gates.total_loss(plain) * (len(part) / len(x))
    out = pipe(x)
    loss = gates.total_loss(pipe)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    (out.sum() * 0 + loss).backward()
    expected.backward()
    for ours, theirs in zip(grads(pipe), grads(plain), strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert torch.equal(gates.total_loss(pipe), loss), "the second forward of a checkpoint left a loss behind"


@pytest.mark.parametrize("form", ["WholeBatch", "all_forwards_first"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_balance_loss_of_the_whole_batch(checkpoint, form):
    plain = model()
    pipe = Pipe(deepcopy(plain), [2, 3], chunks=3, checkpoint=checkpoint)
    x = torch.randn(8, 5, dtype=torch.float64)
    if form == "WholeBatch":
        whole = gates.WholeBatch(pipe)
        with whole.first_pass():
            pipe(x)
        block = whole.second_pass()
    else:
        block = gates.all_forwards_first(pipe)
    with block:
        out = pipe(x)
        loss = gates.total_loss(pipe)
        (out.square().mean() + loss).backward()
    out = plain(x)
    expected = gates.total_loss(plain)
    (out.square().mean() + expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(grads(pipe), grads(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_dropout_is_repeated_by_a_checkpoint():
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), [1, 1], chunks=2, checkpoint="always")
    x = torch.ones(4, 4, requires_grad=True)
    out = pipe(x)
    out.sum().backward()
    kept = (out != 0).to(out.dtype) * 2
    torch.testing.assert_close(x.grad, kept @ pipe[0].weight)


def test_backward_twice_through_a_checkpoint():
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [2], checkpoint="always")
    out = pipe(torch.ones(3, 2)).sum()
    out.backward(retain_graph=True)
    once = pipe[0].weight.grad.clone()
    out.backward()
    assert torch.equal(pipe[0].weight.grad, 2 * once)


def bytes_kept(pipe, x):
    """Storages that the graph of a forward keeps, parameters not counted."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in pipe.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pipe(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_memory_of_the_checkpoint_modes():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]
    kept = {}
    for mode in MODES:
        pipe = Pipe(nn.Sequential(*deepcopy(layers)), [4, 4], chunks=4, checkpoint=mode)
        kept[mode] = bytes_kept(pipe, torch.randn(256, 64))
    assert 2 * kept["always"] < kept["except_last"] < 0.4 * kept["never"], kept


def test_no_checkpoint_outside_of_training():
    calls = []
    layer = nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    pipe = Pipe(nn.Sequential(layer), [1], chunks=2, checkpoint="always")
    pipe(torch.ones(4, 2)).sum().backward()
    assert len(calls) == 4
    pipe.eval()(torch.ones(4, 2)).sum().backward()
    assert len(calls) == 6
    with torch.no_grad():
        pipe.train()(torch.ones(4, 2))
    assert len(calls) == 8


def test_order_of_the_microbatches():
    order = []

    class Note(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            order.append((int(x[0]), self.number))
            return x

    Pipe(nn.Sequential(*map(Note, range(3))), [1, 1, 1], chunks=3)(torch.arange(3.0))
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


def test_attributes():
    linear = nn.Linear(1, 1), nn.Linear(1, 1)
    pipe = Pipe(nn.Sequential(*linear), (1, 1), devices=("cpu",) * 5, chunks=42.0, checkpoint="always")
    assert (pipe.balance, pipe.devices, pipe.chunks, pipe.checkpoint) == ([1, 1], [CPU, CPU], 42, "always")
    assert len(pipe) == 2 and list(pipe) == list(linear)
    assert pipe[0] is linear[0] and pipe[-1] is linear[1]
    with pytest.raises(IndexError):
        pipe[2]
    assert isinstance(pipe.partitions, nn.ModuleList) and isinstance(pipe.partitions[0], nn.Sequential)
    assert next(iter(pipe.state_dict())) == "partitions.0.0.weight"


def test_names_of_the_layers_stay():
    layers = OrderedDict(a=nn.Linear(1, 1), b=nn.Linear(1, 1))
    names = {name for name, _ in Pipe(nn.Sequential(layers), [1, 1]).named_modules()}
    assert {"partitions.0.a", "partitions.1.b"} <= names


def two(width=1):
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (
            {"balance": [1]},
            BalanceError,
            r"different length \(module: 2, sum of balance: 1\).*balance_by_time",
        ),
        ({"balance": [3]}, BalanceError, "sum of balance: 3"),
        ({"balance": [0, 2]}, ValueError, "positive integer"),
        ({"balance": [-1, 3]}, ValueError, "positive integer"),
        ({}, ValueError, r"balance is required.*balance_by_time.*compat\.torch_pipe\.Pipe"),
        ({"balance": [2], "chunks": 0}, ValueError, "chunks must be at least 1, but got 0"),
        ({"balance": [2], "checkpoint": "no"}, ValueError, "'always', 'except_last', or 'never'"),
        ({"balance": [1, 1], "devices": ["cpu"]}, IndexError, r"too few devices .*devices: 1, partitions: 2"),
    ],
)
def test_rejects(arguments, error, text):
    with pytest.raises(error, match=text):
        Pipe(two(), **arguments)


def test_rejects_what_is_no_sequence_of_different_layers():
    with pytest.raises(TypeError, match=r"nn.Sequential.*but got Linear"):
        Pipe(nn.Linear(1, 1), [1])
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="duplicate children"):
        Pipe(nn.Sequential(layer, layer), [1, 1])


def test_rejects_parameters_shared_between_devices():
    shared = two()
    shared[1].weight = shared[0].weight
    with pytest.raises(
        ValueError, match=r"partitions\.0\.0\.weight on cpu is partitions\.1\.1\.weight on meta"
    ):
        Pipe(shared, [1, 1], devices=["cpu", "meta"])
    assert Pipe(shared, [1, 1])[0].weight is shared[1].weight


def test_moving_is_denied_and_casting_is_not():
    pipe = Pipe(two(), [1, 1])
    for move in (pipe.cuda, pipe.cpu, lambda: pipe.to("cpu"), lambda: pipe.to(device=0), lambda: pipe.to(0)):
        with pytest.raises(TypeError, match="denied to move"):
            move()
    with pytest.raises(TypeError, match="denied to move"):
        pipe.to(torch.ones(1))
    assert pipe.half()[0].weight.dtype == torch.half
    assert pipe.to(torch.double)[0].weight.dtype == torch.double
    assert pipe.to(dtype=torch.float)[1].weight.dtype == torch.float


def test_values_without_a_tensor_are_refused():
    class Hello(nn.Module):
        def forward(self, x):
            return "hello"

    with pytest.raises(TypeError, match=r"input of Pipe must be a tensor, or a tuple .* but got str"):
        Pipe(two(), [2])("hello")
    with pytest.raises(TypeError, match=r"input of Pipe must be a tensor, .* but got a tuple without one"):
        Pipe(two(), [2])(("hello", None))
    with pytest.raises(TypeError, match=r"result of layer '0' must be a tensor, .* but got str"):
        Pipe(nn.Sequential(Hello()), [1])(torch.ones(1))
    with pytest.raises(
        TypeError, match=r"takes one argument, but got 2: give a tuple.*compat\.torch_pipe\.Pipe"
    ):
        Pipe(two(), [2])(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"\[4, 1\], \[2, 1\].*are cut into \[4, 2\] microbatches"):
        Pipe(two(), [2], chunks=4)((torch.ones(4, 1), torch.ones(2, 1)))
    with pytest.raises(TypeError, match="NoChunk is for a tensor, but got int"):
        NoChunk(3)


def test_layer_of_several_arguments_is_told_how_values_come():
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    class Broken(nn.Module):
        def forward(self, parts):
            return parts[0].view()

    pair = torch.ones(2, 1), torch.ones(2, 1)
    text = r"layer '0' of Pipe, a {}, must take the tuple of 2 values as one argument: .*compat\.torch_pipe\.Pipe"
    with pytest.raises(TypeError, match=text.format("Add")):
        Pipe(nn.Sequential(Add()), [1])(pair)
    with pytest.raises(TypeError, match=text.format("Sequential")):
        Pipe(nn.Sequential(nn.Sequential(Add())), [1])(pair)
    with pytest.raises(TypeError, match=r"view\(\) received an invalid combination"):
        Pipe(nn.Sequential(Broken()), [1])(pair)


@pytest.mark.parametrize("checkpoint", MODES)
def test_layer_that_changes_its_input_in_place_behind_a_border(checkpoint):
    class AddInPlace(nn.Module):
        def forward(self, x):
            return x.add_(1).square()  # square keeps x for its backward

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), AddInPlace(), nn.Linear(3, 2)).double()
    pipe = Pipe(deepcopy(plain), [1, 2], chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3, dtype=torch.float64)
    expected, ours = plain(x), pipe(x)
    torch.testing.assert_close(ours, expected)
    expected.sum().backward()
    ours.sum().backward()
    for a, b in zip(grads(pipe), grads(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_several_tensors_between_partitions():
    class Fork(nn.Module):
        def forward(self, x):
            return x * 2, x > 0, torch.arange(len(x))

    class Join(nn.Module):
        def forward(self, parts):
            x, positive, number = parts
            return (x * positive, number)

    pipe = Pipe(nn.Sequential(Fork(), Join()), [1, 1], chunks=2, checkpoint="always")
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    y, number = pipe(x)
    assert y.tolist() == [2, 0, 6] and number.tolist() == [0, 1, 0]
    y.sum().backward()
    assert x.grad.tolist() == [2, 0, 2]


def test_exception_keeps_its_type_and_names_the_layer():
    class OwnError(Exception):
        pass

    class Fail(nn.Module):
        def forward(self, x):
            raise OwnError("as it was")

    counted = []
    count = nn.Identity()
    count.register_forward_hook(lambda *_: counted.append(1))
    pipe = Pipe(nn.Sequential(nn.Identity(), nn.Identity(), count, Fail()), [1, 1, 1, 1], chunks=3)
    with pytest.raises(OwnError, match="as it was") as raised:
        pipe(torch.rand(3))
    assert len(counted) == 2, "what was under way went on"
    notes = getattr(raised.value, "__notes__", ["in layer '3' of Pipe, a Fail"])  # before Python 3.11: none
    assert notes == ["in layer '3' of Pipe, a Fail"]


def test_empty_module():
    pipe = Pipe(nn.Sequential(), [])
    assert pipe(torch.tensor(42)) == 42 and pipe((torch.tensor(42),)) == (42,)
    with pytest.raises(TypeError):
        pipe(42)


def test_hooks_of_a_partition_are_called():
    pipe, seen = Pipe(two(), [1, 1], chunks=2), []
    pipe.partitions[0].register_forward_hook(lambda module, inp, out: seen.append(out.shape[0]))
    pipe(torch.ones(3, 1))
    assert seen == [2, 1]


def test_pipe_copies_and_state_dict_agree():
    pipe = Pipe(model(torch.float32), [2, 3], chunks=2)
    copy = deepcopy(pipe)
    x = torch.randn(4, 5)
    assert torch.equal(copy(x), pipe(x))
    other = Pipe(model(torch.float32), [2, 3])
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(pipe.state_dict())
    assert torch.equal(other.eval()(x), pipe.eval()(x))


def test_autocast_reaches_the_checkpoint():
    pipe = Pipe(two(8), [1, 1], chunks=2, checkpoint="always")
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = pipe(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.abs().sum() > 0


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_modules_are_searched_as_often_with_many_microbatches_as_with_one(checkpoint, monkeypatch):
    """Gates and batch norms are looked for once a batch: a search visits every module of a partition."""
    searches = []
    search = nn.Module.named_modules

    def counted(module, *args, **kwargs):
        searches.append(module)
        return search(module, *args, **kwargs)

    def number(chunks):
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), [1, 1], chunks=chunks, checkpoint=checkpoint)
        monkeypatch.setattr(nn.Module, "named_modules", counted)
        searches.clear()
        pipe(torch.ones(8, 3)).sum().backward()
        monkeypatch.undo()
        return len(searches)

    assert number(8) == number(1)


@pytest.mark.parametrize("name", ["Pipe", "NoChunk", "skippable", "balance_by_time", "defer_batch_norm"])
def test_old_paths_name_the_new_one(name):
    with pytest.raises(
        ImportError, match=rf"fmoe_ext\.pipeline\.{name} is fmoe_ext\.compat\.fairscale\.{name}"
    ):
        exec(f"from fmoe_ext.pipeline import {name}", {})
    assert hasattr(fairscale, name)


def test_old_module_of_torchs_pipe_names_the_new_one():
    with pytest.raises(ImportError, match=r"fmoe_ext\.pipeline\.compat is fmoe_ext\.compat\.torch_pipe"):
        importlib.import_module("fmoe_ext.pipeline.compat")
