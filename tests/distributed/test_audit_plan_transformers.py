"""audit_plan() of Transformers' expert and tensor parallelism: equal, and the gradient that a seeded mistake loses."""

import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.20", reason="pip install transformers>=5.20")
import audit_plan_transformers as plans

from fmoe_ext.audit import audit_plan

PAGE = Path(__file__).resolve().parents[2] / "docs/audit.md"


IN_TURN = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11's DTensor refuses the strided shards of joined columns"
)


@pytest.mark.parametrize(
    "plan", ["expert_parallel", pytest.param("tensor_parallel", marks=IN_TURN), "fully_sharded"]
)
def test_plan_of_transformers_is_equal(pool, plan):
    report = audit_plan(plans.recipe(plan), pool=pool)
    assert report.ok, str(report)
    assert report.as_dict()["worst"]["gradient"] <= 1e-5


def test_router_that_gets_no_gradient_is_named(pool):
    first = audit_plan(plans.recipe("with_detached_weights"), pool=pool).first
    assert first.note == "zero here"
    assert (first.step, first.quantity, first.name) == (1, "gradient", "model.layers.1.mlp.gate.weight")


def test_plan_that_divides_nothing_is_refused(pool):
    error = audit_plan(plans.recipe("undivided"), pool=pool).error
    assert (
        "Qwen3MoeForCausalLM.from_pretrained(..., dtype" in error and "leaves every parameter whole" in error
    )


def test_recipe_of_the_page_has_18_lines_at_most_and_is_equal(pool, tmp_path, monkeypatch):
    code = re.search(
        r"^```python\n# recipe.py\n(from transformers.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )[1]
    if not plans.EXPERTS_ALONE:
        code = code.replace(", tp_plan={}", "")  # as the page says
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 18
    file = tmp_path / "recipe_of_the_page.py"
    file.write_text(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = audit_plan(str(file), pool=pool)
    assert report.ok, str(report)
    sys.modules.pop(file.stem)
