"""Prove that a model trains to the same numbers however the training is cut up. There are three audits:

    audit(recipe)           a model in our layouts x accumulation x recomputation x padding x dtype
    audit_plan(recipe)      a model as another library parallelizes it, its plan (plans/)
    audit_rollout(model)    whether generated log-probabilities are those of training

The reference for the first two is the same steps in one process on the whole batch. The audit computes it first, then
runs each layout, or the plan, on as many processes of this machine as it has ranks. They talk over gloo, so that no GPU
is needed, and begin with the same parameters. Every rank compares what it computes, in the order of a step: outputs,
loss, gradients, the norm of clipping and clipped gradients (if the training clips), parameters. In float64 rounding
stays below 1e-12 (for models of Transformers, which compute parts in float32, 1e-6, and 1e-5 in audit_plan), so that
any larger difference is a fault: a mean taken for a sum, a loss that counts padding, experts in the wrong order. The
first tensor over the bound is where the fault shows first; all later ones follow from it.

    run.py                          the engine of audit() and audit_plan()
    recipe.py, plan.py, layout.py   what it trains: a Recipe or PlanRecipe; a built-in layout is a plan, too
    cases.py                        the cases of audit()
    training.py, compare.py         a step's tensors, and their comparison with one process
    rollout.py                      audit_rollout(), with forwards.py and coverage.py
    report.py, cli.py               the three reports, and the command
    source.py, shrink.py            recipes and models by name, and small ones of a large configuration

`fmoe audit module:function` does it from a shell, with an exit code for CI. docs/audit.md says more.
"""

import sys
from types import ModuleType
from typing import Any

from fmoe_ext.audit.cases import AuditError, Case, Layout
from fmoe_ext.audit.plan import Parallel, PlanRecipe
from fmoe_ext.audit.recipe import Part, Recipe, spread_experts
from fmoe_ext.audit.report import AuditReport, PlanReport, Result
from fmoe_ext.audit.rollout import RolloutReport, audit_rollout
from fmoe_ext.audit.run import audit, audit_plan

__all__ = [
    "AuditError",
    "AuditReport",
    "Case",
    "Layout",
    "Parallel",
    "Part",
    "PlanRecipe",
    "PlanReport",
    "Recipe",
    "Result",
    "RolloutReport",
    "audit",
    "audit_plan",
    "audit_rollout",
    "spread_experts",
]


class _CallableModule(ModuleType):
    """The module fmoe_ext.audit, which is its function audit() too."""

    def __call__(self, *args: Any, **kwargs: Any) -> AuditReport:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
