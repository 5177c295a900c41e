"""fmoe_ext.audit: equal where a training is right, and the first tensor that differs where a mistake was seeded."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import audit_models as models
import audit_shared
import pytest
import torch
from audit_shared import PLAIN, clip_without_experts, first_difference, unreduced
from torch import nn

import fmoe_ext
from fmoe_ext import testing
from fmoe_ext.audit import AuditError, Layout, Recipe
from fmoe_ext.audit.compare import Value
from fmoe_ext.audit.training import Recorder, watch_draws

ROOT = Path(__file__).resolve().parents[2]


def audited(pool, recipe, **settings):
    return audit_shared.audited(pool, recipe, **(PLAIN | settings))


def test_audit_correct_training_is_equal_in_every_layout(pool):
    report = audited(pool, models.RECIPE, recomputation=["none", "non-reentrant"])
    assert report.ok, str(report)
    assert [str(r.case.layout) for r in report.results[::2]] == ["1 process", "dp 2", "ep 2", "dp 2 x ep 2"]
    assert all(worst <= 1e-12 for r in report.results for worst in r.worst.values())
    assert all(
        set(r.worst) == {"output", "loss", "gradient", "norm", "clipped", "parameter"} for r in report.results
    )
    assert "8 cases of 2 steps" in str(report) and "all equal" in str(report)
    facts = report.as_dict()
    assert facts["ok"] and [case["verdict"] for case in facts["cases"]] == ["equal"] * 8
    assert facts["cases"][1]["recomputation"] == "non-reentrant" and facts["losses"] == list(report.losses)


def test_finds_a_balance_loss_averaged_wrongly(pool):
    first = first_difference(
        audited(pool, replace(models.RECIPE, build=models.local_balance), layouts=["dp2"])
    )
    assert (first.step, first.quantity) == (1, "loss") and first.error > 1e-6


def test_finds_a_missing_gradient_reduction(pool):
    first = first_difference(audited(pool, replace(models.RECIPE, reduce=unreduced), layouts=["dp2"]))
    assert (first.step, first.quantity) == (1, "gradient") and first.error > 1e-3
    assert first.name == "head.bias"  # the first in the order of the backward


def test_finds_a_gate_that_sees_padding(pool):
    sees = replace(models.RECIPE, build=models.PaddingModel, loss=models.masked_loss)
    report = audited(pool, sees, layouts=["1"], padding=["left", "right"])
    assert [r.first.quantity for r in report.failures] == ["loss", "loss"]
    right = replace(sees, build=models.MaskedModel)
    report = audited(pool, right, layouts=["1", "ep2"], padding=["left", "right"])
    assert report.ok, str(report)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_finds_a_recomputation_that_routes_anew(pool, kind):
    recipe = replace(models.RECIPE, build=models.ForgetfulModel)
    assert audited(pool, recipe, layouts=["1"]).ok
    first = first_difference(audited(pool, recipe, layouts=["1"], recomputation=[kind]))
    assert (first.step, first.quantity) == (1, "gradient") and first.name.startswith("blocks.1.")


def test_finds_experts_left_out_of_clipping_in_every_layout(pool):
    report = audited(pool, replace(models.RECIPE, clip=clip_without_experts), layouts=["1"])
    assert not report.failures and not report.ok
    assert {name.split(".")[3] for name in report.facts.clipped_apart} == {"experts"}
    assert len(report.facts.clipped_apart) == 8  # two biases and two weights of each layer
    assert "clipping leaves out blocks.0.mlp.experts.htoh4.weight" in str(report)


def test_finds_experts_left_out_of_clipping_in_one_layout(pool):
    first = first_difference(audited(pool, replace(models.RECIPE, clip=models.clip_local), layouts=["ep2"]))
    assert first.quantity == "norm" and first.error > 1e-3


def test_finds_an_optimizer_that_misses_parameters(pool):
    report = audited(pool, replace(models.RECIPE, optimizer=models.optimizer_without_gates), layouts=["1"])
    assert not report.ok
    assert report.facts.not_updated == [
        f"blocks.{i}.mlp.gate.gate.{name}" for i in (0, 1) for name in ("weight", "bias")
    ]
    assert "the optimizer misses blocks.0.mlp.gate.gate.weight" in str(report)


def test_finds_a_parameter_that_a_layout_lacks(pool):
    report = audited(pool, replace(models.RECIPE, build=models.without_a_bias), layouts=["1", "dp2"])
    (failure,) = report.failures
    assert str(failure.case.layout) == "dp 2" and failure.error == "no rank has head.bias"


def test_audit_error_of_one_rank_is_reported(pool, monkeypatch):
    monkeypatch.setattr(testing, "GRACE", 0.5)  # seconds until the other one is ended, which waits
    recipe = replace(models.RECIPE, build=models.raises_on_last_rank)
    report = audited(pool, recipe, layouts=["1", "dp2"], timeout=120.0)
    (failure,) = report.failures
    assert failure.seconds < 120.0  # the other rank was not left to its timeout
    assert (
        str(failure.case.layout) == "dp 2"
        and failure.error == "rank 1: ValueError: no model for the last rank"
    )
    text = str(report)
    assert (
        "FAILED     dp 2" in text and "1 FAILED" in text and "2 cases of" in text and "DIFFERENT" not in text
    )
    assert text.endswith("1 failed")


def test_audit_module_is_spread_over_ranks(pool):
    torch.manual_seed(1)
    model = models.Model(Layout())
    report = audited(pool, model, batch=models.batch, loss=models.loss)
    assert report.ok, str(report)
    assert len(report.results) == 4


def test_audit_of_an_exchange_over_nodes(pool):
    """Two nodes of two ranks and two of one: recomputed and padded."""
    recipe = replace(models.RECIPE, build=models.NodeModel, loss=models.masked_loss)
    settings = {"padding": ["none", "left"], "recomputation": ["none", "non-reentrant"]}
    report = audited(pool, recipe, layouts=["1", "ep4", "dp2xep2"], **settings)
    assert report.ok, str(report)
    assert all(worst <= 1e-12 for r in report.results for worst in r.worst.values())


def test_audit_names_what_is_left_out(pool):
    recipe = replace(models.RECIPE, leave_out={"ep": "no group", "uneven": "not offered"})
    report = audited(pool, recipe, layouts=["dp2", "ep2"], accumulation=["1", "uneven"])
    assert [str(result.case) for result in report.results] == ["dp 2, float64"]
    assert "left out: ep (no group)" in str(report) and "left out: uneven (not offered)" in str(report)


def fails(model, match, **settings):
    with pytest.raises(AuditError, match=match):
        fmoe_ext.audit(model, **settings)


def test_bad_input():
    fails(3, "takes a Recipe, a function layout -> model, a model, or 'module:function', but got a int")
    fails(models.Model, "needs batch and loss")
    fails(Recipe(lambda layout: None, models.batch, models.loss), "build cannot be sent to other processes")
    fails("no_such_module:recipe", "no_such_module cannot be imported")
    fails("audit_models:nothing", "audit_models has no 'nothing'")
    fails("audit_models", "give module:function")
    fails("audit_models:RECIPE", "RECIPE has no field|belong into it", batch=models.batch)
    fails(models.RECIPE, "a layout is 1, dp2, ep2", layouts=["tp2"])
    fails(models.RECIPE, "padding must be of none, left, right, but got 'middle'", padding=["middle"])
    fails(models.RECIPE, "leave_out names 'pp', but what can be left out is", leave_out={"pp": "none"})
    fails(models.RECIPE, "steps must be at least 1", steps=0)
    fails(models.RECIPE, "timeout must be more than 0 seconds, but got 0", timeout=0)


def test_output_that_lacks_a_part_of_the_batch_is_not_compared():
    """A module that pools the samples of one microbatch has no output to compare, and no infinite error."""
    rows = iter([(0, 2), None, (4, 6), (0, 2), (2, 4), (4, 6)])
    modules = {"pool": nn.Identity(), "whole": nn.Identity()}
    parallel = SimpleNamespace(
        modules=lambda: modules,
        output=lambda x: None if (found := next(rows)) is None else Value(x, found),
    )
    recorder = Recorder(parallel)
    recorder.is_on = True
    for module in modules.values():
        for number in range(3):
            module(torch.full((2, 1), float(number)))
    taken = recorder.take(None)
    assert taken.keys() == {"whole"} and taken["whole"].rows == (0, 6)
    assert taken["whole"].tensor.flatten().tolist() == [0, 0, 1, 1, 2, 2]


class Noisy(nn.Module):
    """Draws outside a dropout, around a module that raises where it is tried."""

    def __init__(self, broken=None):
        super().__init__()
        self.dropout, self.broken = nn.Dropout(), broken
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        if self.broken is not None:
            with suppress(RuntimeError):
                self.broken(x)
        return self.linear(self.dropout(x) + torch.rand_like(x))


def drawing(model):
    with watch_draws(model) as found:
        model(torch.ones(2, 2))
    return list(found)


def test_module_that_draws_beside_one_inside_it_is_named_too():
    assert drawing(nn.Sequential(Noisy(), nn.Linear(2, 2))) == ["0.dropout", "0"]


def test_module_that_raised_does_not_draw_what_others_do():
    assert drawing(Noisy(nn.Linear(3, 2))) == ["dropout", "Noisy"]


def test_random_numbers_are_named(pool):
    report = audited(pool, replace(models.RECIPE, build=models.DropoutModel), layouts=["dp2"])
    assert report.facts.drawing == ["blocks.0.before.1", "blocks.1.before.1"]
    assert "random numbers are drawn by blocks.0.before.1, blocks.1.before.1: no two layouts" in str(report)
    assert not audited(pool, models.RECIPE, layouts=["1"]).facts.drawing


def one_sample(step):
    return {name: x[:1] for name, x in models.batch(step).items()}


def no_module(layout):
    return "model"


def several_losses(model, batch):
    return model(batch["inputs"]).mean(-1)


def infinite_loss(model, batch):
    mean, _ = models.loss(model, batch)
    return mean - float("inf")


def test_bad_recipes(pool):
    small = audited(pool, replace(models.RECIPE, batch=one_sample), layouts=["1"], accumulation=["2"])
    assert "accumulation 2 needs 2 samples on every rank, but one has 1" in str(small)
    with pytest.raises(AuditError, match=r"must return an nn.Module, but returned str"):
        audited(pool, replace(models.RECIPE, build=no_module))
    with pytest.raises(
        AuditError, match=r"loss\(model, batch\) must return a tensor \[\] .* returned shape \[12, 4\]"
    ):
        audited(pool, replace(models.RECIPE, loss=several_losses))
    few = audited(pool, replace(models.RECIPE, batch=one_sample), layouts=["dp2"])
    assert "dp 2 needs 2 samples, but batch(step) returned 1" in str(few)
    with pytest.raises(AuditError, match=r"step 1: loss has NaN or infinity in one process already"):
        audited(pool, replace(models.RECIPE, loss=infinite_loss), layouts=["1"])
    odd = audited(pool, models.RECIPE, layouts=["ep3"])
    assert "experts cannot be spread over the ranks of ep 3 evenly" in str(odd)
    assert isinstance(models.Model(Layout()), nn.Module)


@pytest.mark.long
def test_command_line_and_the_language_model():
    command = [sys.executable, "-m", "fmoe_ext.audit", "examples/lm/audit.py:recipe", "--layouts", "1,ep2"]
    command += ["--accumulation", "1,uneven", "--dtypes", "float64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 cases of 2 steps" in done.stdout and "all equal" in done.stdout
    wrong = [sys.executable, "-m", "fmoe_ext.audit", "nowhere.py:recipe"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: nowhere.py does not exist")
