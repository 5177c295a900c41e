"""Check that a Mixture-of-Experts model, ours or not, keeps invariants: doctor.check(model, batch), or `fmoe doctor`.

There is no second implementation to compare with. The model, on copies in float64, is compared with itself: a gradient
with the slope of the loss, a step with the same step in two microbatches, an output with itself among other samples, a
saved model with the loaded one. examine.py runs the checks, report.py has INVARIANTS with their advice, and a Subject
(subject.py) says how the model trains, where that is not as usual.
"""

from fmoe_ext.doctor.examine import check
from fmoe_ext.doctor.report import INVARIANTS, Finding, Report
from fmoe_ext.doctor.subject import Subject

__all__ = ["INVARIANTS", "Finding", "Report", "Subject", "check"]
