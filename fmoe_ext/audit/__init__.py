"""Proves that a model trains to the same numbers however the training is cut up: fmoe_ext.audit(model, ...).

    report = fmoe_ext.audit(recipe)  # layouts x accumulation x recomputation x padding x dtype
    print(report)
    assert report.ok

`python -m fmoe_ext.audit module:function` does it from a shell, with an exit code for CI. docs/audit.md says more.
"""

import sys
from types import ModuleType
from typing import Any

from fmoe_ext.audit.cases import AuditError, Case, Layout
from fmoe_ext.audit.plan import Parallel, PlanRecipe
from fmoe_ext.audit.recipe import Part, Recipe, spread_experts
from fmoe_ext.audit.report import AuditReport, PlanReport, Result
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
    "audit",
    "audit_plan",
    "spread_experts",
]


class _CallableModule(ModuleType):
    """fmoe_ext.audit is both the module and its function, as time.time would be if it were spelled once."""

    def __call__(self, *args: Any, **kwargs: Any) -> AuditReport:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
