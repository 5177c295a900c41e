"""Layers as FastMoE's programs build them, against loops over tokens and experts; expert_utils, balance, megatron."""

import argparse
import importlib
import types

import numpy
import pytest
import torch
from torch import nn

import fmoe_ext.compat as fmoe
from fmoe_ext.compat.functions import prepare_forward
from fmoe_ext.compat.gates import NaiveGate
from fmoe_ext.compat.layers import FMoE
from fmoe_ext.compat.linear import FMoELinear, MOELinear
from fmoe_ext.compat.transformer import FMoETransformerMLP, _Expert
from fmoe_ext.testing import assert_close

E, D, H = 4, 6, 10


def compat(module):
    return importlib.import_module(f"fmoe_ext.compat.{module}")


def tokens(num=12, dtype=torch.float64, seed=0):
    return torch.randn(num, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_loops(gate, expert, x):
    """sum_k weight * expert(e, x[t]), token by token."""
    topk_idx, topk_weights = gate(x)
    rows = []
    for t in range(len(x)):
        pairs = zip(topk_idx[t].tolist(), topk_weights[t], strict=True)
        rows.append(sum(weight * expert(e, x[t]) for e, weight in pairs if e >= 0))
    return torch.stack(rows)


def mlp(experts, e, x, activation):
    hidden = activation(experts.htoh4.weight[e] @ x + experts.htoh4.bias[e])
    return experts.h4toh.weight[e] @ hidden + experts.h4toh.bias[e]


class CustomFMoE(FMoE):
    """FastMoE's documented way to make a layer: a subclass that sets self.experts."""

    def __init__(self, activation, **kwargs):
        super().__init__(num_expert=E, d_model=D, **kwargs)
        self.experts = _Expert(E, D, H, activation, rank=3)
        self.mark_parallel_comm("dp")


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_expert_module_in_a_layer(top_k):
    torch.manual_seed(0)
    layer = CustomFMoE(torch.tanh, top_k=top_k).double()
    x = tokens().requires_grad_()
    expected = by_loops(layer.gate, lambda e, row: mlp(layer.experts, e, row, torch.tanh), x)
    out = layer(x)
    torch.testing.assert_close(out, expected)
    parameters = [x, *layer.parameters()]
    ours = torch.autograd.grad(out.sin().sum(), parameters)
    theirs = torch.autograd.grad(expected.sin().sum(), parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert {p.dp_comm for p in layer.experts.parameters()} == {"dp"}
    assert {p.dp_comm for p in layer.gate.parameters()} == {"gate"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_transformer_mlp_in_every_dtype(dtype):
    torch.manual_seed(0)
    layer = FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=H, top_k=2, activation=nn.ReLU()).to(dtype)
    x = tokens(dtype=dtype)
    topk_idx, topk_weights = layer.gate(x)

    def plain(wanted):
        experts, rows = layer.experts, x.to(wanted)
        each = torch.stack(
            [
                torch.relu(rows @ w1.to(wanted).T + b1.to(wanted)) @ w2.to(wanted).T + b2.to(wanted)
                for w1, b1, w2, b2 in zip(
                    experts.htoh4.weight,
                    experts.htoh4.bias,
                    experts.h4toh.weight,
                    experts.h4toh.bias,
                    strict=True,
                )
            ],
            1,
        )
        chosen = each.gather(1, topk_idx[..., None].expand(-1, -1, D))
        return (topk_weights[..., None].to(wanted) * chosen).sum(1)

    assert_close(layer(x.view(3, 4, D)).view(-1, D), plain(torch.float64), plain(dtype), str(dtype))


def test_separate_experts_are_called_with_their_count():
    counts = []

    class Counting(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.linear = nn.Linear(d_model, d_model)

        def forward(self, x, fwd_expert_count):
            assert fwd_expert_count.tolist() == [len(x)]
            counts.append(len(x))
            return self.linear(x)

    layer = FMoE(num_expert=E, d_model=D, expert=Counting).double()
    x = tokens()
    torch.testing.assert_close(layer(x), by_loops(layer.gate, lambda e, row: layer.experts[e].linear(row), x))
    assert sum(counts) == 24


def test_list_of_expert_classes():
    classes = [lambda d: nn.Linear(d, d), lambda d: _Expert(1, d, H, torch.relu), lambda d: nn.Identity()]
    layer = FMoE(num_expert=99, d_model=D, expert=classes).double()
    assert layer.num_expert == 3

    def expert(e, row):
        return mlp(layer.experts[1], 0, row, torch.relu) if e == 1 else layer.experts[e](row)

    x = tokens()
    torch.testing.assert_close(layer(x), by_loops(layer.gate, expert, x))


class FirstOf(NaiveGate):
    """A gate for nests, as users write them: looks at one entry."""

    def forward(self, inp):
        return super().forward(inp["x"] if isinstance(inp, dict) else inp[0])


@pytest.mark.parametrize("nest", ["dict", "list"])
def test_nested_inputs(nest):
    class Sum(nn.Module):
        def __init__(self, d_model):
            super().__init__()
            self.linear = nn.Linear(d_model, d_model)

        def forward(self, inp):
            x, y = inp.values() if isinstance(inp, dict) else inp
            return self.linear(x) + y

    layer = FMoE(num_expert=E, d_model=D, expert=Sum, gate=FirstOf).double()
    x, y = tokens(), tokens(seed=1)
    inp = {"x": x, "y": y} if nest == "dict" else [x, y]
    topk_idx, topk_weights = layer.gate(inp)
    expected = torch.stack(
        [
            sum(
                w * (layer.experts[e].linear(x[t]) + y[t])
                for e, w in zip(topk_idx[t], topk_weights[t], strict=True)
            )
            for t in range(12)
        ]
    )
    torch.testing.assert_close(layer(inp), expected)


def test_mask_and_gate_hook():
    seen = []
    mask = torch.tensor([0, 1, 2] * 4)
    layer = FMoE(
        num_expert=E,
        d_model=D,
        expert=lambda d: nn.Linear(d, d),
        mask=mask,
        mask_dict={1: torch.zeros(D), 2: torch.full((D,), 7.0)},
        gate_hook=lambda idx, score, context: seen.append((idx, score, context)),
    ).double()
    x = tokens()
    expected = by_loops(layer.gate, lambda e, row: layer.experts[e](row), x)
    expected = torch.where(mask[:, None] == 1, 0.0, torch.where(mask[:, None] == 2, 7.0, expected))
    torch.testing.assert_close(layer(x), expected.double())  # the weights of NaiveGate sum to 1
    assert len(seen) == 1 and seen[0][2] is None
    assert torch.equal(seen[0][0], layer.gate(x)[0])


def test_gate_with_flat_results():
    """FastMoE's own NoisyGate and ZeroGate returned idx [B * K] and scores [B, 1, K]; users' gates may still."""

    class Flat(NaiveGate):
        def forward(self, inp):
            topk_idx, topk_weights = super().forward(inp)
            return topk_idx.flatten(), topk_weights.unsqueeze(1)

    torch.manual_seed(0)
    flat = FMoE(num_expert=E, d_model=D, gate=Flat, expert=lambda d: nn.Linear(d, d)).double()
    torch.manual_seed(0)
    plain = FMoE(num_expert=E, d_model=D, gate=NaiveGate, expert=lambda d: nn.Linear(d, d)).double()
    assert torch.equal(flat(tokens()), plain(tokens()))


@pytest.mark.parametrize("capacity", [0.4, 0.9, 1.2])
@pytest.mark.parametrize("name", ["GShardGate", "SwitchGate"])
def test_capacity_of_the_gates(name, capacity):
    """No expert takes more than its capacity, none drops below it, first come first served, nothing else changes."""
    top_k = 2 if name == "GShardGate" else 1
    gate = getattr(fmoe.gates, name)(D, E, 1, capacity=(capacity, 2.4)).double()
    gate.switch_eps, gate.random_routing = 0, False
    x = tokens(40)
    limit = -int(-capacity * 40 // 1) * 2 // E if top_k == 2 else -int(-capacity * 40 // E)
    topk_idx, _, logits = gate(x, return_all_scores=True)
    wanted = logits.topk(top_k).indices
    for e in range(E):
        order = [(k, t) for k in range(top_k) for t in range(40) if wanted[t, k] == e]
        kept = [(k, t) for k, t in order if topk_idx[t, k] == e]
        assert kept == order[:limit]


def test_state_dict_layouts():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=H)
    fused = layer.state_dict()
    per_expert = {}  # FastMoE since 2023
    for key, value in fused.items():
        if key.startswith("experts."):
            for e in range(E):
                per_expert[f"module.experts.{e}.{key.removeprefix('experts.')}"] = value[e : e + 1]
        else:
            per_expert[f"module.{key}"] = value
    for state in (fused, per_expert):
        other = FMoETransformerMLP(num_expert=E, d_model=D, d_hidden=H)
        other.load_state_dict(state)
        assert torch.equal(other(tokens(dtype=torch.float32)), layer(tokens(dtype=torch.float32)))


def test_linear():
    torch.manual_seed(0)
    linear = FMoELinear(3, D, H, rank=5).double()
    x, counts = tokens(), torch.tensor([5, 0, 7])
    expected = torch.cat(
        [x[:5] @ linear.weight[0].T + linear.bias[0], x[5:] @ linear.weight[2].T + linear.bias[2]]
    )
    torch.testing.assert_close(linear(x, counts), expected)
    x.requires_grad_()
    assert torch.equal(MOELinear.apply(x, counts, linear.weight, linear.bias), linear(x, counts))
    assert torch.autograd.gradcheck(
        lambda x, w, b: MOELinear.apply(x, counts, w, b), (x, linear.weight, linear.bias)
    )


def test_expert_utils():
    utils = compat("fastermoe.expert_utils")
    torch.manual_seed(0)
    experts = nn.ModuleList(_Expert(1, D, H, torch.relu) for _ in range(2))
    x = tokens(dtype=torch.float32)
    count = torch.tensor([12])
    mine, other = experts[0](x, count).detach(), experts[1](x, count).detach()
    size = utils.get_expert_param_size(experts, 1)
    assert size == 2 * D * H + D + H
    params, grads = torch.empty(size), torch.empty(size)
    utils.get_expert_params(experts, params, 1)
    experts[0].htoh4.bias.grad = torch.ones(1, H)
    utils.stash_expert_params(experts, params, 0)
    assert torch.equal(experts[0](x, count), other)
    experts[0](x, count).sum().backward()
    expected = torch.cat([p.grad.flatten() for p in experts[0].parameters()])
    utils.collect_expert_grads(experts, grads, 0)
    assert torch.equal(grads, expected)
    assert all(p.grad is None for p in experts[0].parameters())
    utils.pop_expert_params(experts, 0)
    utils.pop_expert_params(experts, 0)
    assert torch.equal(experts[0](x, count), mine)
    assert torch.equal(experts[0].htoh4.bias.grad, torch.ones(1, H))
    utils.set_grads(experts, grads, 1)
    utils.set_grads(experts, grads, 1)
    assert torch.equal(torch.cat([p.grad.flatten() for p in experts[1].parameters()]), 2 * grads)


def test_switches(monkeypatch):
    config, policies = compat("fastermoe.config"), compat("fastermoe.shadow_policy")
    monkeypatch.setenv("FMOE_FASTER_ALPHA", "2.5")
    assert config.float_from_env("FMOE_FASTER_ALPHA") == 2.5
    assert config.float_from_env("FMOE_FASTER_UNSET", 3) == 3
    assert policies.get_shadow_policy(d_model=8) is policies.no_shadow_policy
    for value, on in {"1": True, "ON": True, "0": False, "yes": False}.items():
        monkeypatch.setenv("FMOE_FASTER_SHADOW_ENABLE", value)
        assert config.switch_from_env("FMOE_FASTER_SHADOW_ENABLE") is on
        assert (policies.get_shadow_policy() is policies.global_policy) is on
    counts = torch.tensor([9, 0, 0, 0])
    assert policies.global_policy(counts, counts, 4, 1, "cpu").tolist() == [False] * 4


def test_global_policy(monkeypatch):
    policies, ranks = compat("fastermoe.shadow_policy"), compat("_ranks")
    monkeypatch.setattr(ranks, "all_gather", lambda x, world_size, group: [x, 2 * x])
    monkeypatch.setenv("FMOE_FASTER_SHADOW_ENABLE", "1")
    policy = policies.get_shadow_policy(d_model=64)
    skewed, even = torch.tensor([0, 50_000, 10, 10]), torch.tensor([10, 10, 10, 10])
    assert policy(skewed, None, 2, 2, "cpu").tolist() == [False, True, False, False]
    assert policy(even, None, 2, 2, "cpu").tolist() == [False] * 4
    few = torch.tensor([0, 50, 10, 10])  # not worth the copy of an expert, unless copies cost nothing
    assert policy(few, None, 2, 2, "cpu").tolist() == [False] * 4
    monkeypatch.setenv("FMOE_FASTER_GLBPLC_NETBW", "1e18")
    assert policy(few, None, 2, 2, "cpu").tolist() == [False, True, True, True]


def test_balance_profile():
    balance = compat("balance")
    profile = {}
    balance.reset_balance_profile(profile, 2, "gshard")
    assert profile["Lmax-over-Lmean"] == [None, None] and profile["gshard_loss"] == [None, None]
    idx = torch.tensor([[0, 1], [0, 2], [0, -1]])
    balance.update_balance_profile(profile, idx, None, torch.tensor(0.5), 1, 4, "gshard")
    load = torch.tensor([3.0, 1, 1, 0])
    assert profile["coefficient-variation"][1].item() == pytest.approx((load.std() / load.mean()).item())
    assert profile["Lmax-over-Lmin"][1].item() == 4
    assert profile["Lmax-over-Lmean"][1].item() == pytest.approx(3 / 1.25)
    assert profile["gshard_loss"] == [None, torch.tensor(0.5)]


def megatron_args(**options):
    args = dict(
        num_experts=E, hidden_size=D, hidden_hidden_size=H, top_k=2, distributed_experts=True, rank=0,
        data_parallel_size=1, init_method_std=0.02, num_layers=8, balance_strategy=None,
    )  # fmt: skip
    return types.SimpleNamespace(**(args | options))


def test_megatron_mlp():
    megatron = compat("megatron.layers")
    numpy.random.seed(0)
    layer = (
        megatron.MegatronMLP(megatron_args(balance_strategy="gshard", hidden_hidden_size=400), 0)
        .double()
        .eval()
    )
    assert type(layer.gate) is fmoe.gates.GShardGate
    assert layer.experts.htoh4.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.experts.h4toh.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    x = tokens().view(3, 4, D)
    out, bias = layer(x)
    gelu = nn.functional.gelu
    expected = by_loops(layer.gate, lambda e, row: mlp(layer.experts, e, row, gelu), x.view(12, D))
    torch.testing.assert_close(out.view(12, D), expected)
    assert bias.tolist() == [0] * D
    fake = megatron._FakeMegatronMLP(megatron_args(), None).double()
    out, bias = fake(x)
    torch.testing.assert_close(out, fake.fc2(torch.relu(fake.fc1(x))))
    assert not bias.any()


def test_megatron_profile_and_arguments():
    balance = compat("megatron.balance")
    balance.reset_gate_hook(2)
    hooks = [balance.generate_megatron_gate_hook(layer, E) for layer in range(2)]
    hooks[0](torch.tensor([[0, 1], [2, 3]]), None, None)
    hooks[1](torch.tensor([[0, 0], [0, 0]]), None, None)
    assert [v.item() for v in balance.get_balance_profile()["Lmax-over-Lmean"]] == [1, 4]
    scalars = {}
    writer = types.SimpleNamespace(add_scalar=lambda tag, value, step: scalars.update({(tag, step): value}))
    balance.add_balance_log(None, writer, 9)
    assert scalars["balance-Lmax-over-Lmean/layer-1", 9] == 4
    assert scalars["balance-Lmax-over-Lmean/all", 9] == 2.5
    assert balance.get_balance_profile()["Lmax-over-Lmean"] == [None, None]

    parser = argparse.ArgumentParser()
    args = compat("megatron.utils").add_fmoe_args(parser).parse_args(["--fmoefy", "--num-experts", "4"])
    assert (args.fmoefy, args.num_experts, args.top_k, args.balance_loss_weight) == (True, 4, 2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-experts")
    args = compat("megatron.utils").add_fmoe_args(parser).parse_args(["--fmoe-num-experts", "4"])
    assert args.fmoe_num_experts == 4


def test_errors_are_exceptions_with_text():
    """Calls in which FastMoE's native code ends the process."""
    with pytest.raises(RuntimeError, match=r"topk_idx must be in \[-1, 4\).*element 1 is 9"):
        prepare_forward(torch.tensor([[0, 9]]), 4, 1)
    with pytest.raises(ValueError, match=r"fwd_expert_count must have shape \[4\]"):
        FMoELinear(4, D, H)(tokens(dtype=torch.float32), torch.tensor([12]))
