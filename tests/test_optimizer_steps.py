import gc

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fmoe_ext import FMoETransformerMLP, SigmoidGate


def step(layer, optimizer):
    layer(torch.randn(16, 4)).sum().backward()
    optimizer.step()


def test_layer_collected_during_step_is_skipped():
    torch.manual_seed(0)
    kept = FMoETransformerMLP(4, 4, 8, gate=SigmoidGate)
    optimizer = torch.optim.SGD(kept.parameters(), lr=0.1)
    others = [FMoETransformerMLP(4, 4, 8, gate=SigmoidGate)]
    others[0].itself = [others[0]]  # a circle, which only the collector frees

    def collect(*_):
        others.clear()
        gc.collect()

    hooks = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        step(kept, optimizer)
    finally:
        for hook in hooks:
            hook.remove()
    assert kept.gate.expert_bias.abs().max() > 0, "the step moved no bias"


def test_gate_bias_moves_at_its_own_optimizer_only():
    torch.manual_seed(0)
    layer, other = FMoETransformerMLP(4, 4, 8, gate=SigmoidGate), nn.Linear(4, 4)
    other(torch.randn(2, 4)).sum().backward()
    layer(torch.randn(16, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert layer.gate.expert_bias.tolist() == [0] * 4
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert layer.gate.expert_bias.abs().max().item() == pytest.approx(layer.gate.bias_update_speed)


def test_gate_bias_moves_after_a_step_of_another_optimizer_failed():
    torch.manual_seed(0)
    layer = FMoETransformerMLP(4, 4, 8, gate=SigmoidGate)
    failing = torch.optim.SGD(layer.parameters(), lr=0.1)  # stays alive

    def closure():
        raise MemoryError("the batch is too large")

    with pytest.raises(MemoryError):
        failing.step(closure)
    step(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert layer.gate.expert_bias.abs().max().item() == pytest.approx(layer.gate.bias_update_speed)


def test_gate_bias_stays_while_a_checkpoint_makes_the_state_of_an_optimizer():
    """torch.distributed.checkpoint steps a new optimizer without gradients; counted choices wait for the next step."""
    torch.manual_seed(0)
    layer, other = (FMoETransformerMLP(4, 4, 8, gate=SigmoidGate) for _ in range(2))
    optimizer = torch.optim.AdamW(layer.parameters())
    step(layer, optimizer)
    optimizer.zero_grad()
    layer(torch.randn(16, 4))  # saved in the middle of a step
    set_model_state_dict(other, get_model_state_dict(layer))
    of_other = torch.optim.AdamW(other.parameters())
    set_optimizer_state_dict(other, of_other, get_optimizer_state_dict(layer, optimizer))
    assert (
        torch.equal(other.gate.pending_load, layer.gate.pending_load) and layer.gate.pending_load.sum() == 32
    )
    assert torch.equal(other.gate.expert_bias, layer.gate.expert_bias)
    of_other.step()
    assert other.gate.pending_load.sum() == 0
