"""Sweeps of which make test or .ci/run runs a part that meets every value, and make test-all the rest."""

import pytest

# One format with scales, one with zero points too, and one whose blocks hold their scales.
OPCHECKED = ("mxfp4", "int4", "q4_k")


def rest_is_long(cases, quick):
    """Parameters of a test: those of `cases` that are not in `quick` are marked long."""
    return _rest_is(pytest.mark.long, cases, quick)


def rest_is_slow(cases, quick):
    """The same with the others for make test-all alone."""
    return _rest_is(pytest.mark.slow, cases, quick)


def one_is_long(cases):
    """Parameters of a test of most of a minute: the first case is for .ci/run, the rest for make test-all alone."""
    first, *rest = cases
    return [_marked(first, pytest.mark.long), *(_marked(case, pytest.mark.slow) for case in rest)]


def _rest_is(mark, cases, quick):
    cases, quick = list(cases), list(quick)
    assert all(case in cases for case in quick), f"{quick} are not all of {cases}"
    return [case if case in quick else _marked(case, mark) for case in cases]


def _marked(case, mark):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
