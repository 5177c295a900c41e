"""The doctor names every exhibit of the museum and is silent about models without a mistake."""

import json
import subprocess
import sys

import pytest
import torch
from tests.doctor.museum import EXHIBITS, subject
from tests.doctor.plain import Model

from fmoe_ext import FMoE, doctor
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.doctor.cli import main
from fmoe_ext.gates import GATES


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit_is_named_by_its_invariant(name):
    invariant, thread, make = EXHIBITS[name]
    report = doctor.check(make())
    assert invariant in report.named(), f"{thread}\n{report}"


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"top_k": 1}])
def test_plain_model_without_a_mistake_raises_no_alarm(options):
    report = doctor.check(subject(model=lambda: Model(**options)))
    assert report.ok, str(report)
    assert {"router-gradient", "gradient-size", "checkpoint", "batch"} <= {
        finding.invariant for finding in report.findings if finding.verdict == "ok"
    }


@pytest.mark.parametrize("gate", sorted(GATES))
def test_our_gates_raise_no_alarm(gate):
    torch.manual_seed(0)
    layer = FMoE(num_expert=4, d_model=12, gate=GATES[gate], top_k=2 if gate not in ("switch",) else 1)
    report = doctor.check(layer, torch.randn(16, 12))
    assert not report.wrong, str(report)
