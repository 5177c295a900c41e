"""Sweeps of which make test runs a part that meets every value, and .ci/run and make test-all the rest."""

import pytest

# One format with scales, one with zero points too, and one whose blocks hold their scales.
OPCHECKED = ("mxfp4", "int4", "q4_k")


def rest_is_long(cases, quick):
    """Parameters of a test: those of `cases` that are not in `quick` are marked long."""
    cases, quick = list(cases), list(quick)
    assert all(case in cases for case in quick), f"{quick} are not all of {cases}"
    return [case if case in quick else _long(case) for case in cases]


def _long(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
