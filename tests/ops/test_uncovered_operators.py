"""fmoe_ext.audit.coverage: which operators are named, and that trying one twice writes into nothing of the model."""

import pytest
import torch
from torch import nn

from fmoe_ext import batch_invariant
from fmoe_ext.audit.coverage import uncovered_operators

# operators of another library
LIBRARY = torch.library.Library("fmoe_tests", "DEF")
LIBRARY.define("write_product(Tensor x, Tensor weight, Tensor(a!) y) -> ()")
LIBRARY.define("product(*, Tensor x, Tensor weight) -> Tensor")


def write_product(x, weight, y):
    y.copy_(x @ weight)


LIBRARY.impl("write_product", write_product, "CPU")
LIBRARY.impl("product", lambda x, weight: x @ weight, "CPU")


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("number", torch.tensor(1.0))

    def forward(self, x):
        return self.function(self, x)


def named(function, *sizes):
    """Operators that are named in forwards of x [rows, 4], for several numbers of rows."""
    module = Called(function)
    inputs = [torch.arange(1.0, 4 * rows + 1).view(rows, 4) for rows in sizes]
    with batch_invariant(), torch.no_grad():
        found = uncovered_operators(module, [lambda x=x: module(x) for x in inputs])
    return [name for one in found for name in one.operators]


def write(_, x):
    y = torch.empty_like(x)
    torch.ops.fmoe_tests.write_product(x, torch.eye(4), y)
    return y


def integers(x):
    return torch.arange(1, len(x) + 1)


NAMED = {
    "aten.mm": lambda _, x: torch.ops.aten.mm(x, torch.eye(4)),
    "fmoe_tests.write_product": write,
    "fmoe_tests.product": lambda _, x: torch.ops.fmoe_tests.product(x=x, weight=torch.eye(4)),
    "aten.pow": lambda _, x: x * integers(x)[:, None] ** 1.3,
    "aten.cosh": lambda _, x: x * torch.cosh(integers(x))[:, None],
    "aten.arange": lambda _, x: x * torch.arange(0, 0.1 * (len(x) - 0.5), 0.1)[:, None],
    "aten.index_add": lambda _, x: x.bfloat16().index_add(0, integers(x) - 1, x.bfloat16(), alpha=0.37),
    "aten.sum": lambda _, x: x.T.contiguous().sum(-1),
    "aten.linalg_vector_norm": lambda _, x: torch.linalg.vector_norm(x.T.contiguous(), dim=-1),
    "aten.topk": lambda _, x: x.topk(3, 0).indices * x[:1, :1],
    "aten.sort": lambda _, x: x.sort(0).indices * x[:1, :1],
    "aten.div": lambda _, x: x.cfloat() / torch.complex(x, x.cos()),
    "aten.reciprocal": lambda _, x: torch.complex(x, x.cos()).reciprocal(),
    "aten.angle": lambda _, x: torch.angle(torch.complex(x, x.cos()), out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", NAMED)
def test_operators_are_named(name):
    assert name in named(NAMED[name], 30, 50)


@pytest.mark.parametrize("rows", [(3, 5), (5, 3), (3, 5, 3)])
def test_operator_of_one_forward_alone_is_named(rows):
    function = NAMED["aten.mm"]
    assert named(lambda _, x: function(_, x) if len(x) == 5 else x, *rows) == ["aten.mm"]


NOT_NAMED = {
    "rows of one length": lambda _, x: x.sum(-1) if len(x) == 3 else x.sum(-1) + x.norm(dim=-1),
    "equal numbers in some rows of two lengths": lambda _, x: (
        (0 * x).topk(2)[0] + (x[:, :3] * (len(x) > 9)).topk(2)[0]
    ),
    "maxima of parts": lambda _, x: x.scatter_reduce(0, torch.zeros(len(x), 4).long(), x, "amax"),
    "a stable order": lambda _, x: x.sort(dim=0, stable=True).indices * x[:1, :1],
    "embedding_bag": lambda _, x: (
        nn.functional.embedding_bag(torch.zeros(len(x), 3).long(), torch.eye(4)) + x
    ),
    "masked_fill_": lambda _, x: (x + 1).masked_fill_(x > 9, 0.0),
    "masked_fill_ of a tensor": lambda _, x: (x + 1).masked_fill_(x > 9, x[0, 0]),
    "floor_divide": lambda _, x: x // 9,
    "views": lambda _, x: (x + 1).unsqueeze_(0).transpose_(1, 2).squeeze_(0).t_().swapaxes_(0, 1),
    "nanquantile": lambda _, x: torch.nanquantile(x, 0.3, -1),
}


@pytest.mark.parametrize("name", NOT_NAMED)
def test_operators_that_move_or_sum_alike_are_not_named(name):
    assert named(NOT_NAMED[name], 3, 50) == []


def test_operator_with_the_same_sizes_in_every_forward_is_not_named():
    def slopes(_, x):  # as ALiBi has
        return x * torch.ops.aten.mm(torch.ones(4, 4), torch.eye(4))[0]

    assert named(slopes, 3, 5) == []


class Tries(nn.Module):
    """A module that takes another way where its part raises."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x):
        try:
            return self.part(x)
        except RuntimeError:
            return torch.ops.aten.mm(x, torch.eye(4))


def test_module_is_named_after_an_error_that_it_catches():
    module = nn.Sequential(Tries())
    with batch_invariant(), torch.no_grad():
        found = uncovered_operators(module, [lambda n=n: module(torch.ones(n, 4)) for n in (3, 5)])
    assert [(one.module, one.operators) for one in found] == [("0", ("aten.mm",))]


COVERED = {
    "arange": lambda _, x: x * torch.arange(len(x), dtype=x.dtype)[:, None],
    "integers": lambda _, x: x * (integers(x)[:, None] * 0.37) ** 2,
    "index_add": lambda _, x: (
        x.index_add(0, integers(x) - 1, x, alpha=0.37).bfloat16().index_add(0, integers(x) - 1, x.bfloat16())
    ),
    "a number": lambda module, x: x * module.number,
    "out": lambda _, x: torch.mul(x, 0.37, out=torch.empty_like(x)),
    "out of another size": lambda _, x: torch.exp(x, out=torch.empty(0)),
    "parts": lambda _, x: torch.frexp(x)[0],
}


@pytest.mark.parametrize("name", COVERED)
def test_operators_that_are_alike_at_every_place_are_not_named(name):
    assert named(COVERED[name], 30, 50) == []


WRITES = {
    "mul_ of a number": lambda module, x: module.number.mul_(0.5),
    "mul_": lambda module, x: x.mul_(0.5),
    "mul_ of a view": lambda module, x: x[:, 1].mul_(0.5),
    "add_ of a number to itself": lambda module, x: module.number.add_(module.number),
    "out is an argument": lambda module, x: torch.mul(x, 2.0, out=x),
    "out is a number": lambda module, x: torch.add(module.number, 1.0, out=module.number),
    "two results": lambda module, x: torch.frexp(x, out=(x, torch.empty_like(x, dtype=torch.int32))),
    "list": lambda module, x: torch._foreach_mul_([x, module.number], 0.5),
}


@pytest.mark.parametrize("name", WRITES)
def test_trying_an_operator_writes_into_nothing(name):
    modules, inputs = [Called(WRITES[name]) for _ in range(2)], [torch.ones(3, 4) * 3 for _ in range(2)]
    with batch_invariant(), torch.no_grad():
        modules[0](inputs[0])
        uncovered_operators(modules[1], [lambda: modules[1](inputs[1])])
    assert torch.equal(inputs[1], inputs[0]) and modules[1].number == modules[0].number
    assert not torch.equal(inputs[0], torch.ones(3, 4) * 3) or modules[0].number != 1
