"""The pytest plugin audits the recipe files of another project and fails with the tensor that differs."""

import pytest

import fmoe_ext.audit  # noqa: F401  # pytester forgets what a run imports, and torch cannot be imported twice

pytest_plugins = ["pytester"]

RECIPE = """
import torch
from torch import nn

from fmoe_ext.audit import Parallel


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(4, 4, generator=generator), "y": torch.randn(4, 2, generator=generator)}


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def parallelize(model, rank, world):
    return Parallel(WRAP(model), (rank, world))
"""


def project(pytester, settings=""):
    """A project with a correct recipe and one whose gradients nobody reduces."""
    pytester.makeini(f"[pytest]\n{settings}")
    folder = pytester.mkdir("layouts")
    (folder / "averaged.py").write_text(RECIPE.replace("WRAP", "nn.parallel.DistributedDataParallel"))
    (folder / "unreduced.py").write_text(RECIPE.replace("WRAP", ""))


def run(pytester, *arguments):
    return pytester.runpytest_inprocess("-p", "fmoe_ext_pytest", "-p", "no:cacheprovider", *arguments)


def test_recipe_files_are_tests_and_the_report_is_the_failure(pytester):
    project(pytester, "audit_recipes = layouts/*.py\naudit_worlds = 2\n")
    result = run(pytester)
    result.assert_outcomes(passed=1, failed=1)
    assert "gradient of 2.bias is off by" in result.stdout.str()
    assert "unreduced.py: audit[2 ranks]" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()


def test_recipe_files_without_the_setting_are_not_collected(pytester):
    project(pytester)
    run(pytester).assert_outcomes()


def test_every_number_of_ranks_is_a_test_that_a_marker_leaves_out(pytester):
    project(pytester, "audit_recipes = layouts/*.py\naudit_worlds = 2 4\n")
    listed = run(pytester, "--collect-only", "-q").stdout.str()
    assert listed.count("audit[2 ranks]") == listed.count("audit[4 ranks]") == 2
    run(pytester, "-m", "not audit").assert_outcomes(deselected=4)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [("unreduced.py", "gradient of 2.bias is off by"), ("absent.py", "absent.py cannot be audited: ")],
)
def test_fixture_fails_the_test_that_calls_it(pytester, recipe, said):
    project(pytester)
    pytester.makepyfile(f"def test_layout(audit_plan):\n    audit_plan('layouts/{recipe}', world=2)\n")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    assert said in result.stdout.str()


def test_fixture_returns_the_report_of_an_equal_plan(pytester):
    project(pytester)
    pytester.makepyfile(
        "def test_layout(audit_plan):\n"
        "    report = audit_plan('layouts/averaged.py', steps=1)\n"
        "    assert report.ok and len(report.as_dict()['losses']) == 1\n"
    )
    run(pytester).assert_outcomes(passed=1)
