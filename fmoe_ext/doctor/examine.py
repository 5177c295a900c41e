"""Run every check on one model.

The doctor has no second implementation to compare a model with, and does not read its code. It takes the model apart
by what can be seen from outside (structure.py): experts are a list of equal modules or a stack of matrices, their
router is a matrix from their width to their number, and choices and scores show in the calls of torch that make them,
which a torch function mode observes. Then it compares the model with itself, on copies in float64 (case.py), where
rounding leaves 1e-16 and a mistake leaves more:

* a gradient with the slope of the loss along it (gradients.py, wiring.py)
* a step with the same step in two microbatches, an evaluation with another, a saved model with the loaded one
  (behaviour.py)
* an output with itself among other samples, in another order or after another batch (independence.py)
* one layer alone with itself after one score, token or expert has changed (probe.py): the rows that move tell who
  computed a token, and the ratios of the moves are the ratios of its weights (routing.py)

Where a design may break an invariant on purpose (a capacity, a custom backward, random numbers in training) a violation
is undecided, with the reason.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from fmoe_ext.audit.cases import AuditError
from fmoe_ext.doctor import behaviour, gradients, independence, routing, wiring
from fmoe_ext.doctor.case import Case, verdict
from fmoe_ext.doctor.report import Finding, Report
from fmoe_ext.doctor.structure import repeated, unregistered
from fmoe_ext.doctor.subject import Subject

# (the invariant to name if the check cannot run, the check), in the order of the report. A check may be about several.
_CHECKS: tuple[tuple[str, Callable[[Case], Iterator[Finding]]], ...] = (
    ("finite", gradients.finite),
    ("router-gradient", gradients.router_gradient),
    ("expert-gradient", gradients.expert_gradient),
    ("gradient-size", gradients.gradient_size),
    ("used", wiring.unused),
    ("input-gradient", wiring.input_gradient),
    ("weighted", wiring.weighted_biases),
    ("choice-bias", wiring.choice_bias),
    ("bias-direction", wiring.bias_direction),
    ("experts-differ", gradients.experts_differ),
    ("frozen", wiring.half_frozen),
    ("frozen", wiring.frozen_choice),
    ("cleared", wiring.grows),
    ("optimizer", gradients.optimizer_steps),
    ("clip-norm", gradients.clipping),
    ("accumulation", gradients.accumulation),
    ("balance-size", gradients.balance),
    ("balance-cost", gradients.balance_cost),
    ("evaluation", behaviour.evaluation),
    ("batch", independence.outputs),
    ("balance-padding", independence.padding),
    ("own-row", routing.routing),
    ("drops", behaviour.drops),
    ("recomputation", behaviour.recomputation),
    ("bias-once", behaviour.bias_once),
    ("balance-padding", behaviour.bias_padding),
    ("checkpoint", behaviour.checkpoint),
    ("repeatable", behaviour.repeatable),
    ("options", behaviour.options),
    ("adapters", behaviour.adapters),
    ("merged", behaviour.merged),
)


def check(model: Any, batch: Any = None, **parts: Any) -> Report:
    """Check the invariants of a MoE model on one batch; `assert check(model, batch).ok` is a test.

    model: an nn.Module with the batch that it takes (a tensor, or keyword arguments), or a Subject. parts: other
    fields of Subject; they and batch replace those of a Subject. Copies in float64 are examined on the model's device;
    the model stays as it is. Raises AuditError if the model has no MoE layer.

    Example:

        >>> from fmoe_ext import doctor
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> report = doctor.check(mlp, torch.randn(32, 8))
        >>> report.ok
        True
    """
    began = time.perf_counter()
    # restored at the end: checks seed the generators, of CUDA devices too
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.set_num_threads(1)  # small tensors: several threads wait longer than they compute
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if isinstance(model, Subject):
                subject = replace(model, **(parts if batch is None else {"batch": batch, **parts}))
            else:
                subject = Subject(model, batch, **parts)
            # mistakes that hide experts from the model itself: nothing else could be examined
            hidden = [
                verdict(
                    "registered",
                    name,
                    True,
                    f"a list of {count} modules, whose parameters the model does not have",
                )
                for name, count in unregistered(subject.model).items()
            ]
            hidden += [
                verdict("experts-differ", name, True, f"its {count} experts are one module")
                for name, count in repeated(subject.model).items()
            ]
            if hidden:
                return Report(hidden, time.perf_counter() - began)
            case = Case(subject)
            if not case.layers:
                raise AuditError(
                    "no MoE layer is found: no experts of one shape beside a router of their number"
                )
            findings: list[Finding] = []
            for name, run in _CHECKS:
                try:
                    findings += list(run(case))
                except Exception as error:  # raised by the model, whatever it is: undecided, with the reason
                    text = (str(error).splitlines() or [""])[0]
                    text = f"cannot run: {type(error).__name__}: {text[:90]}"
                    findings.append(verdict(name, "", None, text))
    finally:
        torch.random.set_rng_state(state)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
        torch.set_num_threads(threads)
    return Report(findings, time.perf_counter() - began)
