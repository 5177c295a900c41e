"""A gate's linear layer, choice and loss as one node of autograd: the bits of the steps, and where it is taken."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoETransformerMLP, batch_invariant, ops
from fmoe_ext.gates import GShardGate, NaiveGate, SoftmaxGate, SwitchGate
from tests.forked import run_python

T, D, H, E, K = 37, 24, 20, 12, 3
SMALL_SWITCH = partial(SwitchGate, capacity=(0.5, 1.0))


def make(**options):
    torch.manual_seed(0)
    return FMoETransformerMLP(E, D, H, "swiglu", **{"top_k": K, **options})


def results(layer, x, wrap=lambda f, x: f(x)):
    layer.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    torch.manual_seed(1)  # for the noise of gates
    out = wrap(layer, x)
    (out.square().sum() + 0.3 * layer.gate.get_loss(clear=False).sum()).backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def nodes_of(layer, x):
    """Names of the nodes between the output of the gate and x."""
    found = []
    layer.gate.register_forward_hook(lambda module, inputs, output: found.append(output[1].grad_fn))
    layer(x)
    names, nodes = set(), [found[0]]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            try:
                nodes += [source for source, _ in node.next_functions]
            except RuntimeError:
                pytest.skip(f"torch {torch.__version__} does not show the graph of a registered operator")
    return names


def tokens(num_tokens=T, requires_grad=True):
    x = torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(num_tokens))
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("num_tokens", [T, 1, 0])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("gate_bias", [True, False])
@pytest.mark.parametrize("gate", ["naive", "softmax", "gshard", "switch", "dc", SMALL_SWITCH])
def test_one_node_has_the_bits_of_two(num_tokens, requires_grad, gate_bias, gate):
    top_k = {"naive": K, "softmax": K, "switch": 1}.get(gate, 2)
    ours, theirs = (make(gate_bias=gate_bias, gate=gate, top_k=top_k) for _ in range(2))
    theirs.gate.gate.register_forward_hook(lambda *_: None)  # has to be called
    x = tokens(num_tokens, requires_grad)
    again = make(gate_bias=gate_bias, gate=gate, top_k=top_k)
    assert any("TopkGateOfLinear" in name for name in nodes_of(again, x))
    assert_same_bits(results(ours, x), results(theirs, x))
    assert (ours.gate.get_loss() == theirs.gate.get_loss()).all()


@pytest.mark.parametrize("num_tokens", [T, 1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gshard_drops_as_its_steps_do(num_tokens, dtype):
    """Capacity, then random routing by the numbers that rand_like draws, then the loss of first choices."""
    gate = GShardGate(D, E, 1, capacity=(0.6, 1.0)).to(dtype)
    x = tokens(num_tokens).to(dtype)
    torch.manual_seed(3)
    topk_idx, topk_weights = gate(x)
    logits = gate.gate(x)
    chosen, weights = ops.topk_gate(logits, 2)
    expected = ops.apply_capacity_ref(chosen, E, gate.expert_capacity(0.6, num_tokens))
    torch.manual_seed(3)
    goes = 2 * weights[:, 1] < torch.rand_like(weights[:, 1])
    expected[:, 1] = torch.where(goes, -1, expected[:, 1])
    assert torch.equal(topk_idx, expected)
    assert torch.equal(topk_weights, weights)
    loss = ops.balance_loss_ref(logits, ops.count_tokens(chosen[:, :1].contiguous(), E))
    rtol = 1e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(gate.get_loss(), loss, rtol=rtol, atol=rtol)
    if num_tokens == T:
        assert goes.any()
        assert (topk_idx[:, 0] < 0).any()  # over the capacity


def test_frozen_gate_and_frozen_tokens():
    for frozen in ("weight", "bias"):
        ours, theirs = make(), make()
        theirs.gate.gate.register_forward_hook(lambda *_: None)
        for layer in (ours, theirs):
            getattr(layer.gate.gate, frozen).requires_grad_(False)
        assert_same_bits(results(ours, tokens()), results(theirs, tokens()))


# Options of SoftmaxGate that change its logits, choices, weights or loss.
OTHER_OPTIONS = (
    {"balance_weight": 2.0},
    {"balance_loss": None},
    {"balance_loss": {"global": 1.0}},
    {"balance_loss": "running"},
    {"z_weight": 0.1},
    {"scale": 2.0},
    {"norm_eps": 0.1},
    {"num_groups": 2, "topk_groups": 1},
    {"jitter": 0.1},
    {"random_logits": True},
    {"capacity_factor": 1.0},
)


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=lambda options: next(iter(options)))
def test_gate_with_other_options_is_several_nodes(options):
    layer = make(gate=partial(SoftmaxGate, **options))
    assert not any("OfLinear" in name for name in nodes_of(layer, tokens()))


def test_loss_alone_has_a_gradient():
    ours, theirs = make(gate="softmax"), make(gate="softmax")
    theirs.gate.gate.register_forward_hook(lambda *_: None)
    for layer in (ours, theirs):
        layer(tokens())
        layer.gate.get_loss().backward()
    assert_same_bits(*([p.grad for p in layer.gate.parameters()] for layer in (ours, theirs)))
    assert ours.gate.gate.weight.grad.abs().sum() > 0


COUNTS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from fmoe_ext import FMoETransformerMLP

class Counted(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.total += 1
        return function(*args, **(kwargs or {}))

for gate in ("naive", "softmax", "sigmoid", "switch", "gshard"):
    layer = FMoETransformerMLP(4, 16, 16, top_k=1 if gate == "switch" else 2, gate=gate)
    layer(x := torch.randn(8, 16))
    with Counted() as counted:
        layer(x)
    print(gate, counted.total)
"""


def test_forward_dispatches_few_operators():
    """The host's time of a small layer is that of its operators; the balance loss alone was eleven of them."""
    ran = run_python(
        COUNTS
    )  # in a process of its own: kernels that another test has put in place dispatch more
    counts = {gate: int(count) for gate, count in (line.split() for line in ran.stdout.splitlines())}
    most = {"naive": 8, "softmax": 7, "sigmoid": 10, "switch": 12, "gshard": 10}
    assert counts.keys() == most.keys(), ran.stderr
    assert all(counts[gate] <= most[gate] for gate in most), counts


def second_derivatives(layer, x):
    x = x.detach().requires_grad_()
    params, found = [x, *layer.gate.parameters()], []
    layer.gate.register_forward_hook(lambda module, inputs, output: found.append(output[1]))
    layer(x)
    loss = (found[0] * torch.arange(1.0, K + 1)).square().sum() + layer.gate.get_loss().sum() ** 2
    grads = torch.autograd.grad(loss, params, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), params)


@pytest.mark.parametrize("gate", ["naive", "softmax"])
def test_second_derivative_goes_through_the_logits(gate):
    ours, theirs = make(gate=gate), make(gate=gate)
    theirs.gate.gate.register_forward_hook(lambda *_: None)
    for a, b in zip(second_derivatives(ours, tokens()), second_derivatives(theirs, tokens()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert a.abs().sum() > 0


class OtherGate(NaiveGate):
    def logits(self, inp):
        return 2 * super().logits(inp)


def with_hook(layer):
    layer.gate.gate.register_forward_pre_hook(lambda module, inputs: None)


def with_own_forward(layer):
    plain = layer.gate.gate.forward
    layer.gate.gate.forward = lambda inp: plain(inp)


def with_adapter(layer):
    layer.gate.gate = nn.Sequential(layer.gate.gate)


@pytest.mark.parametrize("change", [with_hook, with_own_forward, with_adapter])
def test_changed_linear_layer_is_called(change):
    layer = make()
    change(layer)
    assert not any("OfLinear" in name for name in nodes_of(layer, tokens()))


def test_other_computations_are_two_nodes():
    others = [
        (make(gate=OtherGate), tokens()),
        (make().double(), tokens().double()),
        (make(dtype=torch.bfloat16), tokens().bfloat16()),
        (make(), torch.randn(D, T).t().requires_grad_()),
    ]
    for layer, x in others:
        assert not any("OfLinear" in name for name in nodes_of(layer, x))
    with batch_invariant():
        assert not any("OfLinear" in name for name in nodes_of(make(), tokens()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not any("OfLinear" in name for name in nodes_of(make(), tokens()))
    names = []
    layer = make()
    layer.gate.register_forward_hook(
        lambda module, inputs, output: names.append(type(output[1].grad_fn).__name__)
    )
    x = tokens()
    expected = results(make(), x)
    assert_same_bits(results(layer, x, lambda f, x: checkpoint(f, x, use_reentrant=False)), expected)
    assert names and not any("OfLinear" in name for name in names)


def test_torch_func_and_forward_mode():
    layer, x = make(), tokens()
    names = list(dict(layer.named_parameters()))
    params = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(params):
        return torch.func.functional_call(layer, params, (x.detach(),)).square().sum()

    grads = torch.func.grad(loss)(params)
    _, _, *expected = results(layer, x.detach())
    for name, b in zip(names, expected, strict=True):
        torch.testing.assert_close(grads[name], b, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(dual)
