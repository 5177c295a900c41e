"""Prove that a model trains to the same numbers however the training is cut up: fmoe_ext.audit(model, ...).

    report = fmoe_ext.audit(recipe)  # layouts x accumulation x recomputation x padding x dtype
    print(report)
    assert report.ok

A parallel training has a truth: the same steps in one process on the whole batch. The audit computes it first,
then runs the plan on as many processes of this machine as it has ranks. They talk over gloo, so that no GPU is needed,
and begin with the same parameters. Every rank compares what it computes, in the order of a step: outputs, loss,
gradients, the norm of clipping, clipped gradients, parameters. In float64 rounding stays below 1e-12 (1e-6 for models
of Transformers, which compute parts in float32), so that any larger difference is a fault: a mean taken for a sum, a
loss of the padding, experts in the wrong order. The first tensor over the bound is where it happened; all later ones
follow from it.

`python -m fmoe_ext.audit module:function` does it from a shell, with an exit code for CI. docs/audit.md says more.
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
