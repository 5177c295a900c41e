"""A gate calls the module that holds its parameters: hooks, adapters, parametrizations and offloading work."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.gates import GATES, NaiveGate, SigmoidGate, SoftmaxGate, SwitchGate, total_loss
from fmoe_ext.linear import WideLinear

D, E, T = 6, 4, 24
LINEAR_GATES = [
    "naive",
    "gshard",
    "switch",
    "dc",
    "swipe",
    "faster",
    "softmax",
    "sigmoid",
    "expert_choice",
    "uniform",
]


def tokens(dtype=torch.float32):
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


class LowRank(nn.Module):
    """An adapter as PEFT puts it: the module it was, plus a product of two small matrices."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(D, 2, bias=False), nn.Linear(2, E, bias=False)

    def forward(self, inp):
        result = self.base(inp)
        return result + self.up(self.down(inp.to(self.down.weight.dtype))).to(result.dtype)


@pytest.mark.parametrize("name", LINEAR_GATES)
def test_adapter_computes_and_trains(name):
    torch.manual_seed(0)
    gate = GATES[name](D, E, 1).eval()
    merged = copy.deepcopy(gate)
    gate.gate = LowRank(gate.gate)
    with torch.no_grad():
        merged.gate.weight += gate.gate.up.weight @ gate.gate.down.weight
    ours, theirs = (g(tokens(), return_all_scores=True) for g in (gate, merged))
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[2], theirs[2])
    (ours[1] * torch.arange(ours[1].shape[1])).sum().add(ours[2].square().sum()).backward()
    assert gate.gate.up.weight.grad.abs().max() > 0


def test_hooks_and_parametrizations():
    gate = NaiveGate(D, E, 1, gate_bias=False)
    *_, before = gate(tokens(), return_all_scores=True)
    seen = []
    hook = gate.gate.register_forward_hook(lambda module, args, out: seen.append(out))
    gate(tokens())
    assert torch.equal(seen[0], before)
    hook.remove()

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(gate.gate, "weight", Twice())
    *_, after = gate(tokens(), return_all_scores=True)
    torch.testing.assert_close(after, 2 * before)


def test_weights_that_come_with_the_forward():
    """As accelerate offloads: the weight is real only between the hooks of its own module."""
    gate = NaiveGate(D, E, 1)
    expected = gate(tokens())
    real = gate.gate.weight.data

    def load(module, args):
        module.weight = nn.Parameter(real)

    def drop(module, args, out):
        module.weight = nn.Parameter(torch.empty(E, D, device="meta"))

    gate.gate.register_forward_pre_hook(load)
    gate.gate.register_forward_hook(drop)
    drop(gate.gate, None, None)
    for ours, theirs in zip(gate(tokens()), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_stay_float32(dtype):
    gate = NaiveGate(D, E, 1).to(dtype)
    x = tokens(dtype)
    *_, logits = gate(x, return_all_scores=True)
    expected = x.float() @ gate.gate.weight.float().T + gate.gate.bias.float()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(gate.gate(x.view(2, -1, D)).view(T, E), logits)
    plain = nn.Linear(D, E).to(dtype)
    plain.load_state_dict(gate.gate.state_dict())
    gate.gate = plain  # someone's own module: its dtype, widened afterwards
    *_, logits = gate(x, return_all_scores=True)
    assert logits.dtype == torch.float32 and torch.equal(logits, plain(x).float())


@pytest.mark.cpu("quantised products exist there alone")
def test_quantize_dynamic_leaves_the_router_alone():
    model = nn.Sequential(nn.Linear(D, D), NaiveGate(D, E, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao announces its successor
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert type(quantised[1].gate) is WideLinear and type(quantised[0]) is not nn.Linear
    assert quantised(tokens())[0].shape == (T, 2)


def checkpointed(gate, x, use_reentrant):
    return torch.utils.checkpoint.checkpoint(gate, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("make", [SwitchGate, SoftmaxGate])
def test_reentrant_checkpoint_of_the_loss_is_an_error(make):
    torch.manual_seed(0)
    gate, x = make(D, E, 1).double(), tokens(torch.float64).requires_grad_()
    gate.switch_eps = 0
    gate(x)
    (expected,) = torch.autograd.grad(total_loss(gate), gate.gate.weight)
    assert expected.abs().max() > 0
    checkpointed(gate, x, use_reentrant=False)
    (same,) = torch.autograd.grad(total_loss(gate), gate.gate.weight)
    torch.testing.assert_close(same, expected, rtol=1e-12, atol=1e-14)
    checkpointed(gate, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"has no gradient.*use_reentrant=False"):
        total_loss(gate)

    def with_loss_inside(x):
        _, weights = gate(x)
        return weights.sum() * 0 + gate.get_loss()

    checkpointed(with_loss_inside, x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(gate.gate.weight.grad, expected, rtol=1e-12, atol=1e-14)


def test_looking_at_a_loss_without_gradients_is_fine():
    gate = SoftmaxGate(D, E, 1)
    with torch.no_grad():
        gate(tokens())
        assert gate.get_loss().item() > 0.5
        gate.eval()(tokens())
    assert gate.get_loss().item() > 0.5  # evaluation
    naive = NaiveGate(D, E, 1)
    checkpointed(naive, tokens().requires_grad_(), use_reentrant=True)
    assert naive.get_loss().item() == 0  # a constant has no gradient to lose
    frozen = SoftmaxGate(D, E, 1).requires_grad_(False)
    with torch.no_grad():
        frozen(tokens())
    assert frozen.get_loss().item() > 0.5


def test_total_loss_needs_gates():
    with pytest.raises(ValueError, match=r"Sequential has no gate of fmoe_ext.*output_router_logits"):
        total_loss(nn.Sequential(nn.Linear(2, 2)))
    layer = FMoETransformerMLP(E, D, 5, gate=SoftmaxGate)
    layer(tokens())
    loss = layer.gate.get_loss(clear=False)
    assert torch.equal(total_loss(layer), loss)


def model_of(*gates):
    return nn.Sequential(*(FMoETransformerMLP(E, D, 5, gate=gate) for gate in gates)).double()


def test_total_loss_before_the_first_forward_is_a_differentiable_zero():
    model = model_of(SoftmaxGate, NaiveGate)
    total = total_loss(model)
    assert total.dtype == torch.float64 and total.shape == () and total == 0
    total.backward()
    with torch.no_grad():
        assert not total_loss(model).requires_grad


def test_total_loss_read_twice_is_the_same_and_has_the_gradient():
    model, x = model_of(SoftmaxGate, NaiveGate), tokens(torch.float64)
    model(x)
    first, second = total_loss(model), total_loss(model)
    assert torch.equal(first, second) and first > 0.5
    weight = model[0].gate.gate.weight
    (expected,) = torch.autograd.grad(first, weight, retain_graph=True)
    assert torch.equal(torch.autograd.grad(second, weight)[0], expected) and expected.abs().max() > 0
    assert torch.equal(total_loss(model), first), "after the backward too"
    model(2 * x)
    assert not torch.equal(total_loss(model), first)


def test_total_loss_leaves_out_a_layer_that_the_last_forward_skipped():
    model, x = model_of(SoftmaxGate, SoftmaxGate), tokens(torch.float64)
    model(x)
    total_loss(model).backward()
    model[1](x)
    total, alone = total_loss(model), model[1].gate.get_loss(clear=False)
    assert torch.equal(total, alone)
    total.backward()


def test_total_loss_of_an_evaluation_is_its_value():
    model, x = model_of(SoftmaxGate), tokens(torch.float64)
    model.eval()(x)
    expected = total_loss(model)
    expected.backward()
    with torch.no_grad():
        model(x)
    total = total_loss(model)
    assert torch.equal(total, expected) and not total.requires_grad


def test_total_loss_of_a_model_without_balance_warns_once_in_training():
    x, texts = tokens(torch.float64), []
    for model in (model_of(NaiveGate, NaiveGate), model_of(NaiveGate, SoftmaxGate), model_of(SigmoidGate)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.eval()(x)
            total_loss(model)
            for _ in range(2):
                model.train()(x)
                total_loss(model).backward()
        texts.append([str(warning.message) for warning in caught])
    assert len(texts[0]) == 1 and "trains with NaiveGate only, which has no balance loss" in texts[0][0]
    assert texts[1:] == [[], []]


def train(gate, optimizer, micro_batches=1, wrap=lambda gate, x: gate(x)):
    """One step; the choices that it counted."""
    chosen = []
    for i in range(micro_batches):
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(i)).requires_grad_()
        topk_idx, weights = wrap(gate, x)
        chosen.append(topk_idx.flatten())
        (weights * torch.arange(2.0)).sum().backward()
    optimizer.step()
    return torch.cat(chosen).bincount(minlength=E).float()


def step_of(load, speed=1e-3):
    return speed * torch.sign(load.mean() - load)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor])
def test_bias_moves_at_the_optimizers_step(optimizer):
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1)
    model = nn.Sequential(nn.Linear(D, D), gate)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    expected = step_of(train(gate, optimizer, micro_batches=3))
    assert expected.abs().max() > 0
    torch.testing.assert_close(gate.expert_bias, expected)
    assert gate.pending_load.sum() == 0
    expected += step_of(train(gate, optimizer))
    torch.testing.assert_close(gate.expert_bias, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_and_repeated_updates_move_it_once(use_reentrant):
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1)
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: gate.update_bias())  # as an older README has it
    counted = []
    optimizer.register_step_pre_hook(lambda *_: counted.append(gate.pending_load.float()))
    load = train(gate, optimizer, 2, lambda gate, x: checkpointed(gate, x, use_reentrant))
    assert torch.equal(counted[0], load), "repeated forwards counted too"
    gate.update_bias()
    torch.testing.assert_close(gate.expert_bias, step_of(load))


def test_whose_step_moves_it():
    torch.manual_seed(0)
    gate, other = SigmoidGate(D, E, 1), SigmoidGate(D, E, 1)
    twin = copy.deepcopy(gate)
    train(gate, torch.optim.SGD(other.parameters(), lr=0.1))
    assert not gate.expert_bias.any() and gate.pending_load.any()
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1))  # a copy follows its own optimizer
    assert twin.expert_bias.any() and not gate.expert_bias.any()
    still = SigmoidGate(D, E, 1, bias_update_speed=0)
    train(still, torch.optim.SGD(still.parameters(), lr=0.1))
    assert not still.expert_bias.any()


def test_optimizer_inside_another_counts_as_the_outer_one():
    gate = SigmoidGate(D, E, 1)
    updates = []
    gate.after_optimizer_step = lambda: updates.append(1)

    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            self.inner.step()

    outer = Outer(gate.parameters(), lr=0.1)
    outer.inner = torch.optim.SGD(gate.parameters(), lr=0.1)
    outer.step()
    assert updates == [1]
    outer.inner.step()
    assert updates == [1, 1]


def test_skipped_steps_leave_the_choices_for_the_next():
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1)
    optimizer = torch.optim.SGD(gate.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(factor, seed):
        x = torch.randn(T, D, generator=torch.Generator().manual_seed(seed))
        topk_idx, weights = gate(x)
        scaler.scale((weights * torch.arange(2.0)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return topk_idx.flatten().bincount(minlength=E).float()

    skipped = step(float("inf"), 0)
    assert not gate.expert_bias.any() and torch.equal(gate.pending_load.float(), skipped)
    torch.testing.assert_close(gate.expert_bias + step_of(skipped + step(1.0, 1)), gate.expert_bias * 2)


def test_gate_without_updates_warns(monkeypatch):
    monkeypatch.setattr("fmoe_ext.gates.sigmoid_gate.FORWARDS_BEFORE_WARNING", 5)
    x = tokens()

    def warnings_of(gate, num_forwards, after_each=lambda gate: None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(num_forwards):
                gate(x)
                after_each(gate)
        return [str(warning.message) for warning in caught]

    (text,) = warnings_of(SigmoidGate(D, E, 1), 5)
    assert "has not moved for 5 training forwards" in text and "update_biases(model)" in text
    assert not warnings_of(SigmoidGate(D, E, 1), 4)
    assert not warnings_of(SigmoidGate(D, E, 1).eval(), 9)
    assert not warnings_of(SigmoidGate(D, E, 1, bias_update_speed=0), 9)
    assert not warnings_of(SigmoidGate(D, E, 1).requires_grad_(False), 9)
    assert not warnings_of(SigmoidGate(D, E, 1), 9, SigmoidGate.update_bias)
    assert not warnings_of(SigmoidGate(D, E, 1), 9, lambda gate: gate.local_tokens_per_expert.zero_())


def test_megatrons_update_of_the_bias(monkeypatch):
    finalize = pytest.importorskip(
        "megatron.core.distributed.finalize_model_grads", reason="megatron-core is not installed"
    )
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    monkeypatch.setattr(utils.torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    monkeypatch.setattr(utils.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
    torch.manual_seed(0)
    gate = SigmoidGate(D, E, 1)
    topk_idx, _ = gate(tokens())

    class Config:
        moe_router_enable_expert_bias, moe_router_bias_update_rate = True, 0.25
        moe_router_load_balancing_type = "none"

    finalize._update_router_expert_bias([nn.Sequential(gate)], Config)
    load = topk_idx.flatten().bincount(minlength=E).float()
    torch.testing.assert_close(gate.expert_bias, step_of(load, 0.25))
    finalize.reset_model_temporary_tensors(Config, [nn.Sequential(gate)])
    assert gate.pending_load.sum() == 0
    gate.update_bias()
    torch.testing.assert_close(gate.expert_bias, step_of(load, 0.25))
