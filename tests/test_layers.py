import copy
import functools
from collections import namedtuple

import pytest
import torch
from oracle import mix, softmax_weights
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fmoe_ext import (
    BaseGate,
    FMoE,
    FMoELinear,
    FMoETransformerMLP,
    GShardGate,
    NaiveGate,
    SoftmaxGate,
    SwitchGate,
)
from fmoe_ext.experts import FusedExperts
from fmoe_ext.routing import DispatchHandle, permute_rows, unpermute_rows

T, D, E, K = 12, 6, 4, 2


class FixedGate(BaseGate):
    """Returns what it was given, as FastMoE's older gates do: flat choices, weights [T, 1, K]."""

    def __init__(self, topk_idx, topk_weights, flat=False):
        super().__init__(E, 1)
        self.topk_idx, self.topk_weights, self.flat = topk_idx, topk_weights, flat

    def forward(self, inp):
        if self.flat:
            return self.topk_idx.flatten(), self.topk_weights.unsqueeze(1)
        return self.topk_idx, self.topk_weights


class CountingExpert(nn.Module):
    """FastMoE's convention: rows and their number."""

    def __init__(self, d_model):
        super().__init__()
        self.linear = FMoELinear(1, d_model, d_model)

    def forward(self, inp, fwd_expert_count):
        assert fwd_expert_count.tolist() == [inp.shape[0]]
        return self.linear(inp, fwd_expert_count).tanh()


def linear_expert(d_model):
    return nn.Linear(d_model, d_model)


def sequential_expert(d_model):
    return nn.Sequential(nn.Linear(d_model, 3), nn.Tanh(), nn.Linear(3, d_model))


def make_layer(**options):
    torch.manual_seed(0)
    return FMoE(**{"num_expert": E, "d_model": D, "top_k": K, "expert": linear_expert, **options}).double()


def make_input(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (T, D)), generator=generator, dtype=torch.float64)


def make_choices(dropped=True):
    generator = torch.Generator().manual_seed(2)
    topk_idx = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    if dropped:
        topk_idx[1, 0] = topk_idx[3, 1] = topk_idx[5, 0] = topk_idx[5, 1] = topk_idx[T - 1, 1] = -1
    topk_weights = torch.rand(T, K, generator=generator, dtype=torch.float64) + 0.1
    return topk_idx, topk_weights


def call(expert, row):
    """One expert on one row, whatever its convention."""
    x = row.unsqueeze(0)
    return (expert(x, torch.tensor([1])) if isinstance(expert, CountingExpert) else expert(x))[0]


def oracle(layer, x, topk_idx, topk_weights):
    return mix(x, topk_idx, topk_weights, [functools.partial(call, expert) for expert in layer.experts])


def assert_same(ours, truth):
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "expert",
    [
        linear_expert,
        sequential_expert,
        CountingExpert,
        [linear_expert, CountingExpert, sequential_expert, linear_expert],
    ],
)
def test_separate_experts(expert):
    layer = make_layer(expert=expert, num_expert=E if callable(expert) else 99)
    assert layer.num_expert == len(layer.experts) == E and not layer.experts_fused
    x, grad_out = make_input().requires_grad_(), make_input()
    topk_idx, _ = layer.gate(x)
    truth = oracle(layer, x, topk_idx, softmax_weights(layer.gate, x, topk_idx))
    out = layer(x)
    assert_same(out, truth)
    params = [x, *layer.parameters()]
    assert_same(torch.autograd.grad(out, params, grad_out), torch.autograd.grad(truth, params, grad_out))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_dropped_choices(renormalize, flat):
    topk_idx, topk_weights = make_choices()
    topk_weights.requires_grad_()
    layer = make_layer(gate=FixedGate(topk_idx, topk_weights, flat), renormalize=renormalize)
    x, grad_out = make_input().requires_grad_(), make_input()
    weights = topk_weights
    if renormalize:
        kept = topk_weights * (topk_idx >= 0)
        sums = kept.sum(1, keepdim=True)
        scale = topk_weights.sum(1, keepdim=True) / sums.where(sums > 0, 1)
        weights = kept * scale
    truth = oracle(layer, x, topk_idx, weights)
    out = layer(x)
    assert_same(out, truth)
    assert torch.equal(out[5], torch.zeros(D, dtype=x.dtype))
    params = [x, topk_weights, *layer.experts.parameters()]
    assert_same(torch.autograd.grad(out, params, grad_out), torch.autograd.grad(truth, params, grad_out))


def test_expert_without_rows_has_zero_gradient():
    topk_idx = torch.zeros(T, 1, dtype=torch.int32)
    layer = make_layer(gate=FixedGate(topk_idx, torch.ones(T, 1, dtype=torch.float64)), top_k=1)
    x = make_input()
    out = layer(x)
    assert_same(out, layer.experts[0](x))
    out.sum().backward()
    assert torch.equal(layer.experts[2].weight.grad, torch.zeros(D, D, dtype=x.dtype))


def test_subclass_with_fused_experts():
    """FastMoE's way: expert=None, self.experts is one module that is called with rows and counts."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = FMoELinear(E, D, D)

        def forward(self, inp, fwd_expert_count):
            return self.linear(inp, fwd_expert_count)

    layer = make_layer(expert=None)
    assert layer.experts_fused and layer.experts is None
    with pytest.raises(RuntimeError, match="this FMoE has no experts"):
        layer(make_input())
    layer.experts = Fused().double()
    x = make_input()
    topk_idx, topk_weights = layer.gate(x)
    functions = [
        lambda row, e=e: layer.experts.linear.weight[e] @ row + layer.experts.linear.bias[e] for e in range(E)
    ]
    assert_same(layer(x), mix(x, topk_idx, topk_weights, functions))
    with pytest.raises(RuntimeError, match="expert_fn_single needs separate experts"):
        layer.expert_fn_single(x, T, 0)


def test_expert_fn_can_be_overridden():
    class Doubled(FMoE):
        def expert_fn(self, inp, fwd_expert_count):
            return 2 * super().expert_fn(inp, fwd_expert_count)

    torch.manual_seed(0)
    layer = FMoE(num_expert=E, d_model=D, top_k=K).double()
    layer.experts = FusedExperts(E, D, 8).double()
    doubled = Doubled(num_expert=E, d_model=D, top_k=K, gate=layer.gate).double()
    doubled.experts = layer.experts
    x = make_input()
    assert_same(doubled(x), 2 * layer(x))


def test_expert_fn_single():
    layer = make_layer(expert=CountingExpert)
    x = make_input()
    assert torch.equal(layer.expert_fn_single(x, T, 1), layer.experts[1](x, torch.tensor([T])))
    assert torch.equal(
        layer.expert_fn_single(x, torch.tensor([T]), 1), layer.experts[1](x, torch.tensor([T]))
    )


Pair = namedtuple("Pair", ["features", "ids"])


class NestedExpert(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.linear = nn.Linear(d_model, d_model)

    def forward(self, inp):
        features, ids = inp["pair"]
        return {
            "sum": self.linear(features) * ids.unsqueeze(1),
            "grid": [inp["grid"] * features.sum(1)[:, None, None]],
        }


def test_nested_inputs():
    topk_idx, topk_weights = make_choices()
    layer = make_layer(expert=NestedExpert, gate=FixedGate(topk_idx, topk_weights))
    features, ids, grid = make_input(), torch.arange(T), make_input(T, 2, 3)
    out = layer({"pair": Pair(features, ids), "grid": grid})
    assert type(out) is dict and type(out["grid"]) is list
    truth_sum = torch.zeros(T, D, dtype=features.dtype)
    truth_grid = torch.zeros(T, 2, 3, dtype=features.dtype)
    for t in range(T):
        for k in range(K):
            if topk_idx[t, k] >= 0:
                expert = layer.experts[topk_idx[t, k]]
                truth_sum[t] += topk_weights[t, k] * expert.linear(features[t]) * ids[t]
                truth_grid[t] += topk_weights[t, k] * grid[t] * features[t].sum()
    assert_same(out["sum"], truth_sum)
    assert_same(out["grid"][0], truth_grid)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_mask(fused, renormalize):
    """As FastMoE: masked tokens skip the experts, their output is mask_dict's, weighted by the gate."""
    topk_idx, topk_weights = make_choices(dropped=False)
    topk_weights.requires_grad_()
    mask = torch.zeros(T, dtype=torch.int64)
    mask[[1, 4]], mask[6], mask[7], mask[9] = 1, 2, 3, 7
    vector = make_input(D).requires_grad_()
    mask_dict = {1: vector, 2: make_input(K, D), 3: 0.5}
    seen = []
    layer = make_layer(
        expert=None if fused else linear_expert,
        gate=FixedGate(topk_idx, topk_weights),
        mask=mask.reshape(3, 4),
        mask_dict=mask_dict,
        gate_hook=lambda *args: seen.append(args),
        renormalize=renormalize,
    )
    if fused:
        layer.experts = FusedExperts(E, D, 8).double()
    x = make_input()
    out = layer(x)
    assert len(seen) == 1 and seen[0][0] is topk_idx and seen[0][1] is topk_weights and seen[0][2] is None
    layer.mask = None
    truth = layer(x).clone()
    for t in range(T):
        filling = mask_dict.get(int(mask[t]), 0.0)
        if mask[t] != 0:
            truth[t] = topk_weights[t] @ torch.as_tensor(filling, dtype=x.dtype, device=x.device).expand(K, D)
    assert_same(out, truth)
    grads = [torch.autograd.grad(o.square().sum(), [vector, topk_weights]) for o in (out, truth)]
    assert_same(*grads)


def test_mask_alone():
    """Without mask_dict the output of masked tokens is zero; they had gone to their experts, in silence."""
    layer, mask, x = make_layer(), torch.arange(T) % 2, make_input()
    plain = layer(x)
    layer.mask = mask
    assert_same(layer(x), plain * (mask == 0)[:, None])


def test_mask_of_rows_with_more_dimensions():
    topk_idx, topk_weights = make_choices()
    mask = torch.arange(T) % 2
    filling = make_input(2, 3)
    gate = FixedGate(topk_idx, topk_weights)
    layer = make_layer(expert=lambda _: nn.Tanh(), gate=gate, mask=mask, mask_dict={1: filling})
    x = make_input(T, 2, 3)
    weight_sums = (topk_weights * (topk_idx >= 0)).sum(1)[:, None, None]
    filled = topk_weights.sum(1)[:, None, None] * filling
    assert_same(layer(x), torch.where(mask[:, None, None] == 1, filled, weight_sums * x.tanh()))


def test_masked_fillings_are_not_rounded():
    """0.1 was that of float32, in a float64 layer."""
    layer = make_layer(expert=lambda _: nn.Tanh(), mask=torch.ones(4), mask_dict={1: 0.1}).double()
    out = layer(torch.randn(4, D, dtype=torch.float64))
    torch.testing.assert_close(out, torch.full_like(out, 0.1), rtol=1e-15, atol=0)


def test_gate_forms():
    kinds = {
        "class": NaiveGate,
        "partial": functools.partial(NaiveGate, gate_bias=False, normalize=False),
        "function": lambda d_model, num_expert, world_size, top_k: NaiveGate(
            d_model, num_expert, world_size, top_k
        ),
        "switch": SwitchGate,
        "gshard": GShardGate,
    }
    gates = {name: make_layer(gate=gate).gate for name, gate in kinds.items()}
    assert type(gates["class"]) is type(gates["partial"]) is type(gates["function"]) is NaiveGate
    assert gates["class"].gate.bias is not None and gates["class"].normalize
    assert gates["partial"].gate.bias is None and not gates["partial"].normalize
    assert gates["switch"].top_k == K and gates["gshard"].tot_expert == E
    assert make_layer(gate=SwitchGate, gate_bias=False).gate.gate.bias is None

    class OwnGate(BaseGate):  # takes no gate_bias
        def __init__(self, d_model, num_expert, world_size, top_k):
            super().__init__(num_expert, world_size)
            self.args = (d_model, num_expert, world_size, top_k)

    class KeywordGate(NaiveGate):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    assert make_layer(gate=OwnGate).gate.args == (D, E, 1, K)
    assert make_layer(gate=KeywordGate, gate_bias=False).gate.gate.bias is None
    ready = NaiveGate(D, E, 1, K)
    assert make_layer(gate=ready).gate is ready


def test_weights_of_another_dtype():
    topk_idx, topk_weights = make_choices()
    for dtype in (torch.float32, torch.float16):
        weights = topk_weights.to(dtype)
        layer = make_layer(gate=FixedGate(topk_idx, weights))
        x = make_input()
        assert_same(layer(x), oracle(layer, x, topk_idx, weights.double()))


def test_no_tokens():
    layer = make_layer()
    x = make_input(0, D).requires_grad_()
    out = layer(x)
    assert out.shape == (0, D)
    out.sum().backward()
    assert x.grad.shape == (0, D)
    assert all(not param.grad.any() for param in layer.experts.parameters())


def test_mark_parallel_comm_survives_copies():
    layer = make_layer()
    assert not hasattr(layer.experts[0].weight, "dp_comm")
    layer.mark_parallel_comm("moe")
    for module in (layer, copy.deepcopy(layer), copy.deepcopy(nn.Sequential(layer))[0]):
        assert [module.experts[e].bias.dp_comm for e in range(E)] == ["moe"] * E
        assert module.gate.gate.weight.dp_comm == "gate"


def test_state_dict_of_a_wrapped_layer():
    layer, other = make_layer(), make_layer()
    nn.init.ones_(other.gate.gate.weight)
    x = make_input()
    other.load_state_dict({f"module.{key}": value for key, value in layer.state_dict().items()})
    assert torch.equal(other(x), layer(x))


def test_attributes_of_fastmoe():
    with pytest.warns(DeprecationWarning, match="slice_group"):
        layer = make_layer(mp_group=type("OneRank", (), {"size": lambda self: 1})())
    names = ("num_expert", "world_size", "slice_size", "slice_rank", "moe_group", "top_k", "experts_fused")
    assert [getattr(layer, name) for name in names] == [E, 1, 1, 0, None, K, False]


def test_dispatch_and_combine():
    topk_idx, topk_weights = make_choices()
    x = make_input(T, 2, 3)
    rows, handle = permute_rows(x, topk_idx, E)
    assert isinstance(handle, DispatchHandle) and rows.shape == (T * K, 2, 3)
    flat = topk_idx.flatten()
    order = [i for e in range(E) for i in range(T * K) if flat[i] == e]
    assert handle.offs[-1] == len(order)
    assert torch.equal(rows[: len(order)], x[torch.tensor(order) // K])
    assert not rows[len(order) :].any()
    kept = (topk_idx >= 0).sum(1)[:, None, None]
    assert_same(unpermute_rows(rows, handle), x * kept)
    assert_same(unpermute_rows(rows[: len(order)], handle), x * kept)
    weight_sums = (topk_weights * (topk_idx >= 0)).sum(1)[:, None, None]
    assert_same(unpermute_rows([rows], handle, topk_weights)[0], x * weight_sums)
    with pytest.raises(AttributeError):
        handle.offs = None


@pytest.mark.parametrize("option", [{"exchange": "tokens"}, {"overlap_degree": 0}, {"overlap_degree": "all"}])
def test_ways_are_checked_on_one_rank_too(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name} must be .* but got {value!r}"):
        FMoETransformerMLP(4, 8, 16, **option)


@pytest.mark.bad_indices
def test_rejects():
    x = make_input()
    topk_idx, topk_weights = make_choices()
    with pytest.raises(ValueError, match=r"one number of tokens T, but got \[\[12, 6\], \[11, 6\]\]"):
        make_layer()([x, x[1:]])
    with pytest.raises(ValueError, match=r"one number of tokens T, but got \[\]"):
        make_layer()([])
    with pytest.raises(ValueError, match=r"but got \[\[12, 6\], 'NoneType'\]"):
        make_layer()((x, None))
    with pytest.raises(ValueError, match=r"but got \[\[\]\]"):
        make_layer()(x[0, 0])
    with pytest.raises(ValueError, match=r"one entry for each of the 12 tokens, but got shape \[5\]"):
        make_layer(mask=torch.zeros(5), mask_dict={})(x)
    with pytest.raises(ValueError, match=r"\[T=12, K\], but returned \[11, 2\] and \[12, 2\]"):
        make_layer(gate=FixedGate(topk_idx[1:], topk_weights))(x)
    with pytest.raises(ValueError, match=r"but returned \[12, 2\] and \[12, 1\]"):
        make_layer(gate=FixedGate(topk_idx, topk_weights[:, :1]))(x)
    with pytest.raises(ValueError, match="the gate is for 5 experts, but the layer has 4"):
        make_layer(gate=NaiveGate(D, 5, 1))
    with pytest.raises(TypeError, match="gate must be a class, a callable, a module or a name, but got 3"):
        make_layer(gate=3)
    with pytest.raises(ValueError, match=r"unknown gate 'nave': choose one of naive, "):
        make_layer(gate="nave")
    assert type(make_layer(gate="softmax").gate) is SoftmaxGate
    with pytest.raises(
        TypeError, match=r"^FMoE has no argument 'overlap_degre' \(did you mean 'overlap_degree'\?\)$"
    ):
        make_layer(overlap_degre=2)
    with pytest.raises(
        TypeError, match=r"^FMoETransformerMLP has no argument 'd_hiden' \(did you mean 'd_hidden'\?\)$"
    ):
        FMoETransformerMLP(E, D, d_hiden=8)
    with pytest.raises(TypeError, match=r"tokens of a floating dtype, but got torch\.int64"):
        make_layer()(torch.zeros(3, D, dtype=torch.int64))
    with pytest.raises(ValueError, match="top_k must be between 1 and the 4 experts, but got 5"):
        make_layer(top_k=5)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed\.init_process_group"):
        make_layer(world_size=2)
    with pytest.raises(RuntimeError, match=r"in \[-1, 4\)"):
        make_layer(gate=FixedGate(topk_idx + 2, topk_weights))(x)


class KeepsOneRow(nn.Module):
    """An expert that loses rows, as one that averages over them does."""

    def forward(self, rows, count):
        return rows[:1]


def test_experts_that_lose_rows_are_refused():
    topk_idx = torch.tensor([[0], [1], [0], [0], [1], [0]])
    gate = FixedGate(topk_idx, torch.ones(6, 1))
    gate.tot_expert = 2
    separate = FMoE(2, D, top_k=1, gate=gate, expert=lambda _: KeepsOneRow())
    with pytest.raises(ValueError, match=r"expert 0 must return one row .* here 4, but returned \[1, 6\]"):
        separate(torch.randn(6, D))
    together = FMoE(2, D, top_k=1, gate=gate)
    together.experts = KeepsOneRow()
    with pytest.raises(ValueError, match=r"the experts must return one row .* here 6, or 6 .* \[1, 6\]"):
        together(torch.randn(6, D))


@pytest.mark.parametrize(
    ("returned", "what"), [(torch.zeros(3, 2), "Tensor"), ((None,), "1 things"), ((None,) * 3, "3 things")]
)
@pytest.mark.parametrize("base", [nn.Module, BaseGate])
def test_gate_must_return_two_tensors(base, returned, what):
    class Gate(base):
        def __init__(self):
            super().__init__(*(4, 1) if base is BaseGate else ())

        def forward(self, inp):
            return returned

    layer = FMoETransformerMLP(4, 8, 8, gate=Gate())
    with pytest.raises(TypeError, match=f"returns topk_idx and topk_weights, but Gate returned {what}"):
        layer(torch.randn(3, 8))


@pytest.mark.parametrize(
    ("top_k", "message"), [(0, "at least 1"), ("2", "whole number"), (2.0, "whole number")]
)
def test_top_k_is_a_whole_number(top_k, message):
    with pytest.raises((TypeError, ValueError), match=f"top_k must be .*{message}"):
        FMoETransformerMLP(4, 8, 8, top_k=top_k)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_tracing_is_right_or_says_what_to_do():
    """torch.jit.trace kept the rows of its example for all inputs where experts are separate, without a word."""
    x, other = torch.randn(T, D), torch.randn(T + 3, D)
    separate, fused = FMoE(E, D, expert=lambda d: nn.Linear(d, d)), FMoETransformerMLP(E, D, 5)
    with pytest.raises(RuntimeError, match="would keep for all inputs how many rows"), torch.no_grad():
        torch.jit.trace(separate, x)
    with pytest.raises(RuntimeError, match="cannot record the backward of expert_mlp: trace under"):
        torch.jit.trace(fused, x)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(fused.eval(), x)(other), fused(other))


@pytest.mark.cpu("exports on the CPU")
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_separate_experts_is_refused(strict):
    layer = FMoE(3, 4, expert=lambda d: nn.Linear(d, d), top_k=2)
    with pytest.raises(Exception, match=r"separate experts, whose numbers of rows are read on"):
        torch.export.export(layer, (torch.randn(5, 4),), strict=strict)
    if strict:  # both trace by Dynamo; torch.compile goes on without a graph
        assert torch.compile(layer, backend="eager")(torch.randn(5, 4)).shape == (5, 4)


class Scaled(nn.Module):
    """The second argument is an option of the expert's own, whatever it is called."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, discount=0.5):
        return self.linear(x) * discount


class Starred(Scaled):
    def forward(self, *args, **kwargs):
        assert len(args) == 1 and not kwargs
        return super().forward(args[0])


class Demanding(Scaled):
    def forward(self, x, number):
        return super().forward(x) * number.to(x.device)


class NamedAsByFastMoE(Scaled):
    def forward(self, x, fwd_expert_count=None):
        return super().forward(x) * fwd_expert_count.to(x.device)


def through_compile(module):
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [lambda module: module, through_compile, checkpoint_wrapper])
@pytest.mark.parametrize("expert", [Scaled, Starred, Demanding, NamedAsByFastMoE, lambda d: nn.Linear(d, d)])
def test_only_experts_that_ask_for_it_get_their_count(expert, wrap):
    torch.manual_seed(0)
    layer = FMoE(num_expert=3, d_model=8, expert=lambda width: wrap(expert(width)), top_k=1, gate=NaiveGate)
    wants = expert in (Demanding, NamedAsByFastMoE)
    assert [layer.experts.takes_count(*each) for each in enumerate(layer.experts)] == [wants] * 3
    x = torch.randn(9, 8)
    chosen, weights = layer.gate(x)
    out, expected = layer(x), torch.zeros(9, 8)
    for e, wrapped in enumerate(layer.experts):
        rows = chosen[:, 0] == e
        own = x[rows]
        linear = next(m for m in wrapped.modules() if isinstance(m, nn.Linear))
        y = linear(own) * (0.5 if isinstance(linear, nn.Linear) and expert in CLASSES else 1)
        expected[rows] = y * (len(own) if wants else 1) * weights[rows]
    torch.testing.assert_close(out, expected)


CLASSES = (Scaled, Starred, Demanding, NamedAsByFastMoE)


@pytest.mark.parametrize("experts", [(Scaled, Demanding), (Demanding, Scaled)])
def test_expert_that_takes_the_place_of_another_is_called_its_own_way(experts):
    """An option of its own is not taken for the number of rows, and a copy asks for itself."""
    first, second = experts
    layer = FMoE(num_expert=1, d_model=8, expert=first, top_k=1)
    x = torch.randn(9, 8)
    scale = {Scaled: 0.5, Demanding: 0.5 * 9}
    assert torch.equal(layer.expert_fn_single(x, 9, 0), layer.experts[0].linear(x) * scale[first])
    copied = copy.deepcopy(layer)
    layer.experts[0] = second(8)
    for each, kind in ((layer, second), (copied, first)):
        expected = each.experts[0].linear(x) * scale[kind]
        torch.testing.assert_close(each(x), expected * each.gate(x)[1])


@pytest.mark.parametrize("first", [nn.ReLU(inplace=True), nn.SiLU(inplace=True)])
def test_expert_that_begins_in_place_trains(first):
    torch.manual_seed(0)
    plain = type(first)()
    layer = FMoE(num_expert=3, d_model=8, expert=lambda d: nn.Sequential(first, nn.Linear(d, d)))
    other = FMoE(num_expert=3, d_model=8, expert=lambda d: nn.Sequential(plain, nn.Linear(d, d)))
    other.load_state_dict(layer.state_dict())
    x, found = torch.randn(9, 8), []
    for module in (layer, other):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        found.append((out, *torch.autograd.grad(out.square().sum(), [leaf, *module.parameters()])))
        assert torch.equal(leaf, x)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("expert", "text"),
    [
        (nn.Linear, r"called as Linear\(d_model\), which it does not take .*lambda d_model: nn.Linear"),
        (nn.Linear(8, 8), "called to make each expert, but got Linear"),
        (lambda d: torch.zeros(d), "must make a module, but made a Tensor"),
    ],
)
def test_expert_maker_that_makes_no_expert_is_named(expert, text):
    with pytest.raises(TypeError, match=text):
        FMoE(num_expert=2, d_model=8, expert=expert)
