"""fmoe_ext.audit.plans.deepspeed with a fake of deepspeed: how many microbatches a step has, and what is refused.

tests/rediscovery audits DeepSpeed itself.
"""

import importlib
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fmoe_ext.audit.plans
from fmoe_ext.audit import AuditError
from fmoe_ext.audit.plan import PlanRecipe

RANKS, SAMPLES = 2, 8  # of a batch on all ranks


class FakeEngine:
    """Sums gradients of microbatches and steps at the last one, as DeepSpeed counts them."""

    def __init__(self, model, optimizer, config):
        self.model, self.optimizer, self.num_calls = model, optimizer, 0
        # DeepSpeed's rule: batch = micro batch * steps * ranks; one of them may be left out
        whole, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
        self.steps = config.get("gradient_accumulation_steps") or (
            whole // (micro * RANKS) if whole and micro else 1
        )
        optimizer.zero_grad()

    def gradient_accumulation_steps(self):
        return self.steps

    def __call__(self, *args):
        return self.model(*args)

    def backward(self, loss):
        (loss / self.steps).backward()

    def step(self):
        self.num_calls += 1
        if self.num_calls % self.steps == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def plans(monkeypatch):
    """The plan's module, over a fake of deepspeed on the first of two ranks."""
    fakes = {name: types.ModuleType(name) for name in ("deepspeed", "deepspeed.moe.utils", "deepspeed.utils")}
    fakes["deepspeed"].ops = types.SimpleNamespace(__compatible_ops__={})
    fakes["deepspeed"].initialize = lambda **given: (FakeEngine(**given),)
    fakes["deepspeed.moe.utils"].has_moe_layers = lambda model: (False, 0)
    fakes["deepspeed.moe.utils"].split_params_into_different_moe_groups_for_optimizer = None
    fakes["deepspeed.utils"].safe_get_full_grad = lambda p: p.grad
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    yield importlib.import_module("fmoe_ext.audit.plans.deepspeed")
    del sys.modules["fmoe_ext.audit.plans.deepspeed"], fmoe_ext.audit.plans.deepspeed


@pytest.mark.parametrize(
    "sizes, steps",
    [
        ({"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": 2}, 2),
        ({"train_batch_size": SAMPLES, "train_micro_batch_size_per_gpu": 1}, 4),
        ({"train_batch_size": SAMPLES, "gradient_accumulation_steps": 2}, 2),
        ({"train_micro_batch_size_per_gpu": 4}, 1),
        ({"train_batch_size": SAMPLES}, 1),
    ],
)
def test_microbatches_are_those_that_deepspeed_finds(plans, sizes, steps):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    recipe = PlanRecipe(
        lambda: None,
        lambda *_: None,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        dtype="float32",
    )
    x = torch.randn(SAMPLES // RANKS, 3)  # [samples of a rank, width]
    loss = model(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, model.weight)

    none = {"cpu_offload": False, "offload_optimizer": {"device": "none"}, "offload_param": {}}
    engine = plans.Engine(model, model, {**sizes, "zero_optimization": {"stage": 1, **none}})
    engine.prepare(recipe)
    assert bool(engine.modules()) == (steps == 1)  # modules see microbatches
    torch.testing.assert_close(engine.backward(recipe, {"x": x}), loss.detach())
    engine.step()
    assert engine.engine.num_calls == steps
    torch.testing.assert_close(model.weight.detach(), before - gradient)


@pytest.mark.parametrize(
    "zero", [{"stage": 3}, {"cpu_offload": True}, {"offload_optimizer": {"device": "cpu"}}]
)
def test_stages_that_are_not_audited_are_refused(plans, zero):
    model = nn.Linear(3, 2)
    with pytest.raises(AuditError, match="ZeRO 3 and offloading are not audited"):
        plans.Engine(model, model, {"zero_optimization": zero})


def test_float64_is_refused(plans):
    model = nn.Linear(3, 2).double()
    with pytest.raises(AuditError, match='DeepSpeed has no float64: say dtype = "float32"'):
        plans.Engine(model, model, {})
