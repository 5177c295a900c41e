"""Check the invariants that any Mixture-of-Experts model keeps, without a second implementation to compare with."""

from fmoe_ext.doctor.examine import check
from fmoe_ext.doctor.report import INVARIANTS, Finding, Report
from fmoe_ext.doctor.subject import Subject

__all__ = ["INVARIANTS", "Finding", "Report", "Subject", "check"]
