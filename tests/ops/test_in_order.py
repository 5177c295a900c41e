"""Functions of torch under batch_invariant(): values, gradients, and the same bits at every place."""

import math
import operator
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions
from torch.utils.checkpoint import checkpoint

from fmoe_ext import batch_invariant, use_batch_invariant
from fmoe_ext.ops import in_order
from tests.ops import instruction_sets

native = torch.ops.fmoe_ext
FLOATS = (torch.float32, torch.bfloat16)
ELEMENTWISE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "mish": F.mish,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "sigmoid": torch.sigmoid,
    "method": lambda x: x.sigmoid(),
    "exp2": torch.exp2,
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "power": lambda x: (x.abs() + 0.1) ** 1.3,
    "in place": lambda x: x.clone().abs_().add_(0.1).rsqrt_().pow_(0.7).exp2_().sigmoid_(),
    "elu in place": lambda x: F.elu_(x.clone()),
    "celu in place": lambda x: torch.celu_(x.clone()),
    "expit": torch.special.expit,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "power by operator in place": lambda x: operator.ipow((x.abs() + 0.1), 1.3),
    "inverse_root": lambda x: (x.abs() + 0.1).pow(-0.5),
    "power of tensors": lambda x: (x.abs() + 0.1) ** x,
    "power of a number": lambda x: 1.7**x,
    "atanh": lambda x: torch.atanh(x / 20),
    "logit": lambda x: torch.logit(0.5 + x / 40),
    "atan2": lambda x: torch.atan2(x, 1 - x),
    "aliases": lambda x: torch.special.exp2(torch.arctan2(x, 1 - x)).atan2_(x).sinh_().cosh_().reciprocal_(),
    "more aliases": lambda x: torch.celu(torch.selu(x)),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "logaddexp2": lambda x: x.logaddexp2(2 * x),
    "logaddexp of a row": lambda x: torch.logaddexp(x, x.new_ones(1)),
    "glu": lambda x: F.glu(torch.cat((x, 2 * x), -1)),
    "sum with a multiple": lambda x: torch.add(x, x.cos(), alpha=0.37),
    "difference in place": lambda x: x.clone().sub_(x.cos(), alpha=0.37),
    "complex product": lambda x: turned(x).real,
    "complex product in place": lambda x: turned(x).mul_(turned(x)).imag,
    "complex square": lambda x: turned(x).square().real,
    # left to torch
    "exp": torch.exp,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "sin": torch.sin,
    "log": lambda x: (x.abs() + 0.1).log(),
    "relu2": lambda x: F.relu(x).square(),
}


def turned(x):
    """Numbers turned by an angle, as rotary positions written with complex numbers are."""
    x = x.float()
    return torch.complex(x, 1 - x) * torch.polar(torch.ones_like(x), x)


ROWS = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "norm": lambda x: x.norm(dim=-1, keepdim=True),
    "alias of norm": lambda x: torch.linalg.norm(x, dim=-1, keepdim=True),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1, dtype=torch.float32),
    "alias of logsumexp": lambda x: torch.special.logsumexp(x, -1, keepdim=True),
    "alias of softmax": lambda x: torch.special.softmax(x, -1, dtype=torch.float32),
    "alias of log_softmax": lambda x: torch.special.log_softmax(x, -1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1),
}


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*ELEMENTWISE, *ROWS])
def test_rows_in_every_batch_and_layout_have_the_same_bits(name, dtype):
    function = {**ELEMENTWISE, **ROWS}[name]
    threads = torch.get_num_threads()
    with batch_invariant():
        for width in (3, 24, 100, 1000):
            wide = 3 * randn(70, 2 * width, dtype=dtype)
            rows = wide[:, :width]
            whole = function(rows.contiguous())
            layouts = (rows, wide.chunk(2, -1)[0], rows.t().contiguous().t())
            for x in layouts:
                assert torch.equal(function(x), whole), width
                for begin, end in ((0, 1), (3, 4), (2, 9), (69, 70)):
                    assert torch.equal(function(x[begin:end]), whole[begin:end]), (width, begin)
            try:
                torch.set_num_threads(1 if threads > 1 else 2)
                assert torch.equal(function(rows.contiguous()), whole), "the number of threads"
            finally:
                torch.set_num_threads(threads)


def test_every_alias_of_a_function_is_replaced():
    """torch.special and torch.linalg have twins of functions, under their names, that are other objects."""
    replaced = {_plain_name(f) for f in in_order.REPLACEMENTS}
    functions = [f for of_module in get_overridable_functions().values() for f in of_module]
    left = [f.__name__ for f in functions if _plain_name(f) in replaced and f not in in_order.REPLACEMENTS]
    assert left == []


def _plain_name(function):
    return function.__name__.removeprefix("special_").removeprefix("linalg_")


@pytest.mark.parametrize("size", [(0,), (3, 5), (2, 3, 5)])
def test_out_gets_the_size_of_the_result(size):
    a, b = randn(3, 4), randn(4, 5, seed=1)
    y = a @ b
    for function, given in (
        (torch.mm, (a, b)),
        (torch.addmm, (y, a, b)),
        (torch.sigmoid, (y,)),
        (torch.pow, (y.abs(), 1.3)),
        (torch.softmax, (y, 0)),
        (torch.log_softmax, (y, 1)),
        (torch.logsumexp, (y, 0)),
        (torch.logsumexp, (y, 1, True)),
        (torch.sum, (y, 0, True)),
        (torch.mean, (y, 0)),
        (torch.sum, (randn(40000), 0)),  # which threads would share
    ):
        with batch_invariant():
            out = torch.empty(size)
            assert function(*given, out=out) is out
            assert torch.equal(out, function(*given))
        torch.testing.assert_close(out, function(*given))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_functions_of_elements_that_threads_share(name):
    function, x, threads = ELEMENTWISE[name], randn(70_001), torch.get_num_threads()
    try:
        with batch_invariant():
            torch.set_num_threads(1)
            expected = function(x)
            for number in (2, 3):
                torch.set_num_threads(number)
                assert torch.equal(function(x), expected)
                assert torch.equal(function(x[40_000:]), expected[40_000:])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_one_long_row_is_not_divided_among_threads(name):
    rows, threads = randn(2, 70_001), torch.get_num_threads()
    function = getattr(torch, name)
    try:
        torch.set_num_threads(2)
        with batch_invariant():
            expected = function(rows, -1)
            for i, row in enumerate(rows):
                assert torch.equal(function(row, -1), expected[i])
                assert torch.equal(function(row[None], 1, keepdim=True), expected[i : i + 1, None])
                assert torch.equal(function(row[:, None], 0), expected[i : i + 1])
        torch.testing.assert_close(expected, function(rows, -1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("isa", instruction_sets.ISAS)
@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS, torch.float16], ids=str)
def test_products_equal_torch_and_ignore_zeros_around(isa, dtype):
    with instruction_sets.restored():
        instruction_sets.use(isa)
        for depth in (1, 17, 600, 1100):
            a, b = randn(2, 5, depth, dtype=dtype), randn(2, depth, 37, seed=1, dtype=dtype)
            with batch_invariant():
                y = a @ b
                zeros, others = torch.zeros(2, 5, 13, dtype=dtype), randn(2, 13, 37, seed=2, dtype=dtype)
                assert torch.equal(torch.cat((zeros, a), 2) @ torch.cat((others, b), 1), y)
                assert torch.equal(torch.cat((a, zeros), 2) @ torch.cat((b, others), 1), y)
                assert torch.equal(a[:, 2:3] @ b[..., 5:20], y[:, 2:3, 5:20])
                assert torch.equal(a @ b.mT.contiguous().mT, y)
                assert torch.equal(torch.bmm(a, b), y)
                assert torch.equal(a[0] @ b[0], y[0])
                assert torch.equal(a[0, 0] @ b[0], y[0, 0])
                assert torch.equal(torch.baddbmm(y, a, b), y + y)
            exact = a.double() @ b.double()
            scale = a.double().abs() @ b.double().abs()
            eps = torch.finfo(dtype).eps if dtype == torch.float64 else torch.finfo(torch.float32).eps
            assert ((y - exact).abs() <= 2 * depth * eps * scale + torch.finfo(dtype).eps * exact.abs()).all()


@pytest.mark.parametrize("dtype", (*FLOATS, torch.float16), ids=str)
def test_product_by_a_transposed_weight_is_that_of_the_layer(dtype):
    """As heads are written that multiply in chunks; generation calls the layer."""
    x, weight = randn(70, 1100, dtype=dtype), randn(50, 1100, seed=1, dtype=dtype)
    with batch_invariant():
        y = F.linear(x, weight)
        for got in (
            x @ weight.T,
            torch.mm(x, weight[:].t(), out=torch.empty_like(y)),
            (x[None] @ weight.mT)[0],
            torch.linalg.matmul(x, weight.T),
        ):
            assert torch.equal(got, y)
        assert torch.equal(x[3:5] @ weight[7:20].T, y[3:5, 7:20])


def test_broadcast_products():
    a, b = randn(3, 1, 4, 5), randn(2, 5, 6, seed=1)
    with batch_invariant():
        ours = a @ b, a @ b[0], b.mT @ a[0, 0, 0], torch.addmm(b[0, :4], a[0, 0], b[0], beta=0.5, alpha=2)
    plain = a @ b, a @ b[0], b.mT @ a[0, 0, 0], torch.addmm(b[0, :4], a[0, 0], b[0], beta=0.5, alpha=2)
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers(dtype, biased):
    x, weight = randn(3, 50, 40, dtype=dtype), randn(24, 40, seed=1, dtype=dtype)
    bias = randn(24, seed=2, dtype=dtype) if biased else None
    with batch_invariant():
        y = F.linear(x, weight, bias)
        assert torch.equal(F.linear(x[1, 7], weight, bias), y[1, 7])
        assert torch.equal(F.linear(x[1, 7:30], weight, bias), y[1, 7:30])
        assert F.linear(x[:0], weight, bias).shape == (0, 50, 24)
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=2e-2 if biased else 1e-2, atol=1e-2)


def attention_cases():
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    window = causal & ~torch.ones(9, 9, dtype=torch.bool).tril(-4)
    yield "causal", {"is_causal": True}
    yield "window", {"attn_mask": window}
    yield "added", {"attn_mask": torch.zeros(9, 9).masked_fill(~window, -1e9), "scale": 0.3}
    yield "whole", {}


@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS], ids=str)
@pytest.mark.parametrize(
    ("name", "options"), list(attention_cases()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_attention_equals_torch(name, options, dtype):
    options = {**options}
    if "scale" in options:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    q, k, v = (
        randn(2, 4, 9, 8, dtype=dtype),
        randn(2, 2, 9, 8, seed=1, dtype=dtype),
        randn(2, 2, 9, 6, seed=2),
    )
    v = v.to(dtype)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    with batch_invariant():
        ours = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        repeated = (t.repeat_interleave(2, 1) for t in (k, v))
        assert torch.equal(F.scaled_dot_product_attention(q, *repeated, **options), ours)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_has_the_same_bits_behind_padding_and_in_parts(dtype):
    q, k, v = (randn(1, 2, 40, 16, seed=seed, dtype=dtype) for seed in range(3))
    pads = tuple(randn(1, 2, 7, 16, seed=seed, dtype=dtype) for seed in (3, 4))
    with batch_invariant():
        whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for row in (0, 1, 20, 39):
            alone = q[:, :, row : row + 1], k[:, :, : row + 1], v[:, :, : row + 1]
            assert torch.equal(F.scaled_dot_product_attention(*alone), whole[:, :, row : row + 1])
        mask = torch.cat(
            (torch.zeros(40, 7, dtype=torch.bool), torch.ones(40, 40, dtype=torch.bool).tril()), 1
        )
        behind = (torch.cat(pair, 2) for pair in zip(pads, (k, v), strict=True))
        assert torch.equal(F.scaled_dot_product_attention(q, *behind, attn_mask=mask), whole)
        front = (torch.cat(pair, 2) for pair in zip((k, v), pads, strict=True))
        assert torch.equal(F.scaled_dot_product_attention(q, *front, attn_mask=mask.roll(-7, 1)), whole)


def test_attention_of_a_row_without_keys_gives_zeros():
    q, mask = randn(1, 1, 3, 4), torch.tensor([[False, False], [True, False], [True, True]])
    with batch_invariant():
        y = F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2], attn_mask=mask)
    assert not y[0, 0, 0].any() and torch.equal(y[0, 0, 1], q[0, 0, 0])


def test_many_rows_of_attention_are_computed_in_parts(monkeypatch):
    q = randn(1, 2, 30, 8)
    mask = randn(30, 30, seed=1)
    with batch_invariant():
        whole = [
            F.scaled_dot_product_attention(q, q, q, **o) for o in ({"is_causal": True}, {"attn_mask": mask})
        ]
        monkeypatch.setattr(in_order, "_MOST_LOGITS", 500)
        parts = [
            F.scaled_dot_product_attention(q, q, q, **o) for o in ({"is_causal": True}, {"attn_mask": mask})
        ]
    assert all(map(torch.equal, whole, parts))


def test_softmax_of_special_values():
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf, -inf], [0.0, -inf], [0.0, nan], [0.0, inf], [-1e30, -1e30]])
    y = native._softmax_in_order(x, False)
    assert torch.equal(y[[0, 1, 4]], torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]]))
    assert y[2:4].isnan().all()
    assert torch.equal(native._softmax_in_order(x, True).isnan(), x.log_softmax(-1).isnan())
    assert native._softmax_in_order(x[:, :0], False).shape == (5, 0)


def test_cross_entropy_is_that_of_torch():
    logits, target = randn(6, 50), torch.tensor([3, -100, 5, 49, 0, 1])
    plain = F.cross_entropy(logits, target), F.cross_entropy(logits, target, reduction="none")
    with batch_invariant():
        ours = F.cross_entropy(logits, target), F.cross_entropy(logits, target, reduction="none")
        assert torch.equal(ours[1][2:3], F.cross_entropy(logits[2:3], target[2:3], reduction="none"))
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y)


def test_gradients():
    a, b, x = randn(2, 3, 4).double(), randn(2, 4, 5, seed=1).double(), randn(3, 6, seed=2).double()
    for t in (a, b, x):
        t.requires_grad_()
    with batch_invariant():
        for function, inputs in (
            (torch.matmul, (a, b)),
            (lambda x: x.softmax(-1), (x,)),
            (lambda x: x.log_softmax(-1), (x,)),
            (lambda x: x.logsumexp(-1), (x,)),
            (F.silu, (x,)),
            (lambda x: x.mean(0), (x,)),
            (lambda x: F.linear(x, b[0].mT[:, :4].repeat(1, 2)[:, :6]), (x,)),
            (lambda a: F.scaled_dot_product_attention(a, a, a, is_causal=True), (a,)),
        ):
            assert torch.autograd.gradcheck(function, inputs)
    torch.library.opcheck(native._matmul_in_order, (a, b))
    torch.library.opcheck(native._softmax_in_order, (x, True))


@pytest.mark.parametrize("function", [F.silu, F.elu, F.mish, F.selu])
def test_gradients_of_functions_in_place(function):
    x = randn(64).requires_grad_()  # whole vectors
    function(x).sum().backward()
    expected, x.grad = x.grad, None
    with batch_invariant():
        function(x * 1, inplace=True).sum().backward()
    torch.testing.assert_close(x.grad, expected)


BACKWARDS = {
    "method": lambda y, x: y.backward(),
    "method, inputs": lambda y, x: y.backward(torch.ones(()), inputs=[x]),
    "backward": lambda y, x: torch.autograd.backward([y, 2 * y], [torch.ones(()), None], inputs=x),
    "grad": lambda y, x: x.backward(torch.autograd.grad(y, {"x": x}, retain_graph=True)["x"]),
    "edge": lambda y, x: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(y)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BACKWARDS)
def test_checkpoint_inside_the_block_repeats_in_the_mode(name, reentrant):
    if reentrant and name not in ("method", "edge"):
        pytest.skip("torch refuses inputs with a reentrant checkpoint")
    weight, seen = randn(100, 100, seed=1), []

    def forward(x):
        seen.append(F.linear(x, weight).softmax(-1))
        return seen[-1].square().sum()

    gradients = []
    with batch_invariant():
        for function in (forward, lambda x: checkpoint(forward, x, use_reentrant=reentrant)):
            x = randn(3, 100).requires_grad_()
            BACKWARDS[name](function(x), x)
            gradients.append(x.grad)
    assert len(seen) == 3 and torch.equal(seen[0], seen[2]), "the repetition has other bits"
    assert torch.equal(*gradients)


def test_backwards_inside_the_block_are_those_of_torch():
    x = randn(3).requires_grad_()
    with batch_invariant():
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())
        zeros = torch.autograd.grad(x.sum(), (x, randn(2).requires_grad_()), materialize_grads=True)[1]
        assert torch.equal(zeros, torch.zeros(2))
        rows = torch.autograd.grad(x * x, x, torch.eye(3), is_grads_batched=True)[0]
        torch.testing.assert_close(rows, torch.diag(2 * x.detach()))
        by_func = torch.func.grad(lambda x: F.linear(x, torch.eye(3)).square().sum())(x.detach())
        torch.testing.assert_close(by_func, 2 * x.detach())
        with pytest.raises(RuntimeError, match="does not require grad"):
            randn(3).sum().backward()
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (x * 2).backward()


@pytest.mark.parametrize("reaches", [True, False])
def test_inputs_that_are_no_leaves_get_their_gradients(reaches):
    """As of torch: of inputs alone, added up, and None where no path leads."""

    def gradients():
        x = randn(3).requires_grad_()
        y, other = x**2, 3 * x
        inputs = [x, y] if reaches else [other]
        (y**2).sum().backward(inputs=inputs, retain_graph=True)
        torch.autograd.backward((y**3).sum(), inputs=inputs[-1], retain_graph=True)
        (other * y).sum().backward(torch.ones(()))  # y keeps its gradient in later ones too
        return [(t.retains_grad, t.grad) for t in (x, y, other) if t.is_leaf or t.retains_grad]

    expected = gradients()
    with batch_invariant():
        got = gradients()
    assert [kept for kept, _ in got] == [kept for kept, _ in expected]
    for (_, a), (_, b) in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_model_is_refused_or_runs_uncompiled():
    model, x = torch.nn.Sequential(torch.nn.Linear(100, 64), torch.nn.SiLU()), randn(9, 100)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with batch_invariant():
        expected = model(x)
        with pytest.raises(RuntimeError, match=r"torch\.compile around a model.*force_eager"):
            compiled(x)
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(compiled(x), expected) and torch.equal(compiled(x[:1]), expected[:1])


def test_wrong_arguments_are_refused():
    with batch_invariant(), pytest.raises(RuntimeError, match="must have one dtype"):
        randn(2, 3) @ randn(3, 2).double()
    with pytest.raises(RuntimeError, match="x must be float32 or float64, but got"):
        native._softmax_in_order(randn(2, 3).half(), False)
    with pytest.raises(RuntimeError, match=r"b must have shape \[B, K, N\] with size 3 in dimension 1"):
        native._matmul_in_order(randn(1, 2, 3), randn(1, 4, 5))
    with batch_invariant(), pytest.raises(RuntimeError, match="but not with conv1d"):
        F.conv1d(randn(1, 2, 5), randn(2, 2, 3))


SUMS_OF_OTHER_ORDER = {
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "einsum of a list": lambda x, w: torch.einsum("ij,jk->ik", [x, w]),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "inner": lambda x, w: torch.inner(x, w.T),
    "addmv": lambda x, w: torch.addmv(x[:, 0], x, w[:, 0]),
    "addbmm": lambda x, w: torch.addbmm(x @ w, x[None], w[None]),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w, w]),
    "bilinear": lambda x, w: F.bilinear(x, x, w[None]),
    "cdist": torch.cdist,
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x[None], randn(len(x), 2, 3)),
}


@pytest.mark.parametrize("name", SUMS_OF_OTHER_ORDER)
def test_products_that_have_no_fixed_order_are_refused_by_name(name):
    x, weight = randn(6, 6), randn(6, 6, seed=1)
    with batch_invariant(), pytest.raises(RuntimeError, match=f"but not with .*{name.split()[0]}"):
        SUMS_OF_OTHER_ORDER[name](x, weight)
    assert torch.is_tensor(torch.einsum("ij,jk->ik", x, weight))  # as usual outside of the block


def test_products_with_a_vector_are_those_of_a_matrix():
    a, x = randn(9, 300), randn(300, seed=1)
    with batch_invariant():
        expected = a @ x
        assert torch.equal(torch.mv(a, x), expected) and torch.equal(a.mv(vec=x), expected)
        assert torch.equal(torch.dot(a[4], x), expected[4]) and torch.equal(a[4].dot(x), expected[4])


def test_only_inside_the_block_and_on_its_thread():
    x, weight = randn(3, 100), randn(7, 100, seed=1)
    plain = F.linear(x, weight)
    use_batch_invariant(True)
    use_batch_invariant(True)
    try:
        with batch_invariant():
            pass
        inside = F.linear(x, weight)
        assert torch.equal(inside[:1], F.linear(x[:1], weight))
    finally:
        use_batch_invariant(False)
    assert torch.equal(F.linear(x, weight), plain) and not torch.equal(inside, plain)


def test_every_way_to_call_a_function_is_that_of_torch():
    a, b, c = randn(2, 3, 4), randn(2, 4, 5, seed=1), randn(2, 3, 5, seed=2)
    x, values = torch.full((3, 5), -math.inf), torch.tensor([-1.0, 1.0, 2.0])
    x[1, 2], x[2] = math.inf, 1.0

    def results():
        written, in_place = torch.empty(3), values.clone()
        torch.sigmoid(values, out=written)
        F.elu(in_place, 1.0, True)
        return [
            torch.bmm(a, mat2=b),
            torch.matmul(a, other=b),
            torch.matmul(input=a, other=b),
            torch.addmm(c[0], mat1=a[0], mat2=b[0]),
            c.baddbmm(batch1=a, batch2=b, beta=0.5, alpha=2),
            torch.baddbmm(c, a, b, out=torch.empty_like(c)),
            x.logsumexp(-1),
            x.logsumexp(0, keepdim=True),
            a.sum(axis=-1, keepdims=True),
            written,
            in_place,
            torch.add(a, a.cos(), alpha=2),
            torch.rsqrt(values.abs(), out=torch.empty(3)),
            torch.rsqrt(values.abs().bfloat16(), out=torch.empty(3, dtype=torch.bfloat16)),
            F.linear(a, b[0, :, 0]),
            F.linear(a, b[0, :, 0], torch.tensor(0.5)),
            (a[0] + 0j) * 2,
            (a[0] + 0j) * a[1],
            2j * (a[0] + 1j),
            torch.mul(a[0], 1 + 2j),
            a[0].clone().mul_(3),
            torch.add(a.bfloat16(), a.double(), alpha=1 / 3),
            torch.sub(a.double(), a.bfloat16(), alpha=1 / 3),
            a.double().add_(a.bfloat16(), alpha=1 / 3),
            torch.add(a.bfloat16(), torch.tensor(2.0), alpha=0.25),
            torch.mul(a[0] + 1j, other=a[1]),
            torch.pow(input=a.abs(), exponent=1.3),
            torch.atan2(a, other=1 - a),
            F.scaled_dot_product_attention(a, a[:, :0], a[:, :0]),
            torch.zeros(2, 0).logsumexp(1),
            torch.zeros(0, 2).logsumexp(1),
            F.scaled_dot_product_attention(a[:1], a, a),
            F.scaled_dot_product_attention(a[:, None], a[:1], a, attn_mask=values.expand(2, 1, 1, 3)),
        ]

    expected = results()
    with batch_invariant():
        for got, wanted in zip(results(), expected, strict=True):
            torch.testing.assert_close(got, wanted)
        with pytest.raises(RuntimeError, match="attn_mask must be None"):
            F.scaled_dot_product_attention(
                a, a, a, attn_mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True
            )


def test_gradient_of_logsumexp_of_masked_rows_is_zero():
    x = torch.tensor([[-math.inf, -math.inf], [0.0, 1.0]], requires_grad=True)
    with batch_invariant():
        x.logsumexp(-1)[1].backward()
    torch.testing.assert_close(
        x.grad, torch.tensor([[0.0, 0.0], torch.tensor([0.0, 1.0]).softmax(0).tolist()])
    )


def test_mode_of_the_process_may_end_on_another_thread():
    """The functions of torch are those of the thread that began it, which has them back then."""

    def elsewhere(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    begun = []

    def block():
        use_batch_invariant(False)
        with batch_invariant(), pytest.raises(RuntimeError, match="conv1d"):
            F.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 3))
        begun.append(True)

    use_batch_invariant(True)
    try:
        elsewhere(lambda: use_batch_invariant(False))
        assert F.conv1d(torch.ones(1, 1, 5), torch.ones(1, 1, 3)).tolist() == [[[3.0, 3.0, 3.0]]]
        elsewhere(block)
        assert begun
    finally:
        use_batch_invariant(False)
