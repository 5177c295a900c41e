"""audit_plan(): equal where a plan trains what one process trains, and the first tensor where a mistake was seeded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import audit_plans as plans
import pytest
import torch
from torch import nn

from fmoe_ext.audit import AuditError, PlanRecipe, audit_plan
from fmoe_ext.audit.cli import main
from fmoe_ext.audit.plans.pipelining import Staged
from fmoe_ext.audit.source import load_module

ROOT = Path(__file__).resolve().parents[2]


def audited(pool, parallelize, **changes):
    return audit_plan(replace(plans.RECIPE, parallelize=parallelize, **changes), pool=pool)


@pytest.mark.parametrize("plan", [plans.replicated, plans.averaged, plans.fsdp, plans.stage])
def test_correct_plan_is_equal(pool, plan):
    report = audited(pool, plan)
    assert report.ok, str(report)
    facts = report.as_dict()
    assert facts["ok"] and facts["world"] == 2 and len(facts["losses"]) == 2 and facts["first"] is None
    assert all(error <= 1e-12 for error in facts["worst"].values())
    assert str(report).endswith("s: equal")


def test_unreduced_gradient_is_named(pool):
    first = audited(pool, plans.forgets_a_gate).first
    assert (first.step, first.quantity, first.name) == (1, "gradient", "blocks.1.gate.weight")


def test_summed_gradient_is_named_with_its_factor(pool):
    first = audited(pool, plans.sums_gradients).first
    assert (first.quantity, first.name) == ("gradient", "head.bias")
    assert first.note == "2 times that of one process"


def test_wrong_output_is_located_in_its_block_and_rank(pool):
    first = audited(pool, plans.wrong_in_a_block).first
    assert (first.step, first.quantity, first.name, first.rank) == (1, "output", "blocks.1", 1)
    assert first.note == "first inside it: up" and first.error > 1e-3


def test_weights_loaded_wrongly_are_named_before_the_first_step(pool):
    first = audited(pool, plans.wrong_weights).first
    assert (first.step, first.quantity, first.name, first.rank) == (0, "parameter", "head.weight", 1)


def test_absent_parameter_is_named(pool):
    assert audited(pool, plans.without_a_head).error == "no rank has head.weight, head.bias"


def test_bad_plans_are_refused_by_name(pool):
    assert "ValueError: no plan" in audited(pool, plans.raises).error
    assert "must return a model or a Parallel, but returned str" in audited(pool, plans.no_model).error
    uneven = audited(pool, plans.averaged, batch=plans.three_samples)
    assert "3 samples cannot be divided among 2 parts" in uneven.error
    with pytest.raises(AuditError, match=r"no batch can be made for Model: give batch\(step\)"):
        audited(pool, plans.replicated, batch=None)
    with pytest.raises(AuditError, match="dtype must be of float64, float32, but got 'bfloat16'"):
        PlanRecipe(plans.Model, plans.replicated, dtype="bfloat16")
    with pytest.raises(AuditError, match="world must be a positive number, but got 0"):
        PlanRecipe(plans.Model, plans.replicated, world=0)


def test_file_without_the_functions_is_refused(tmp_path, pool):
    file = tmp_path / "no_functions.py"
    file.write_text("model = None\n")
    with pytest.raises(
        AuditError, match=r"no function model and no parallelize: a recipe file defines model\(\)"
    ):
        audit_plan(str(file), pool=pool)


@pytest.mark.parametrize("name", ["json", "recipe_of_another_folder"])
def test_file_with_the_name_of_an_imported_module_is_refused(name, tmp_path):
    for folder in ("first", "second"):
        tmp_path.joinpath(folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(f"folder = {folder!r}\n")
    if name != "json":
        assert load_module(str(tmp_path / f"first/{name}.py")).folder == "first"
        assert load_module(str(tmp_path / f"first/{name}.py")).folder == "first"
    with pytest.raises(AuditError, match=f"is imported already as {name!r}. Give the file another name"):
        load_module(str(tmp_path / f"second/{name}.py"))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["plan.py", "--text", "a"], "--text is of a rollout"),
        (["module:function", "--text", "a"], "--text is of a rollout"),
        (["module:function", "--rollout", "--text", "a"], "let module:function return (model, tokens)"),
        (["model", "--rollout", "--timeout", "9"], "--timeout are of a training"),
    ],
)
def test_options_that_would_be_ignored_are_refused(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_command_audits_a_recipe_file(tmp_path):
    file = tmp_path / "recipe.py"
    names = "batch, loss, Model as model, forgets_a_gate as parallelize"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests/distributed')!r})\nfrom audit_plans import {names}\n"
    )
    command = [sys.executable, "-m", "fmoe_ext.audit", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "gradient of blocks.1.gate.weight is off by" in done.stdout, done.stderr
    done = subprocess.run(
        [*command, "--padding", "left"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and "--padding are for a Recipe" in done.stderr


def test_stages_get_contiguous_inputs():
    class Schedule:
        def step(self, x, *, target, losses):
            losses.append(x.stride()[0] * target.sum().double())

    stages = Staged(
        nn.Linear(2, 2), Schedule(), inputs=lambda b: b["x"][:, :-1], target=lambda b: b["x"][:, 1:]
    )
    stages.prepare(plans.RECIPE)
    loss = stages.backward(plans.RECIPE, {"x": torch.arange(8.0).view(2, 4)})
    assert loss == 3 * (1 + 2 + 3 + 5 + 6 + 7), "torch 2.11 refuses a stage's input with a stride of 4"
