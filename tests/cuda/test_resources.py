"""The committed table of kernel resources: current, without spills; recompiled where nvcc is at hand."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import resources

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found")


def test_table_is_current():
    digest, _ = resources.read_table()
    assert digest == resources.digest(), (
        "sources changed: run python tests/cuda/resources.py and commit the table"
    )


def test_nothing_spills():
    _, kernels = resources.read_table()
    assert {kernel.file for kernel in kernels} == {path.name for path in resources.sources()}
    for kernel in kernels:
        assert kernel.spills == 0, kernel
        assert kernel.stack == 0, kernel
        assert kernel.registers <= 255, kernel


@needs_nvcc
def test_hopper_kernels_compile_as_the_table_says():
    """The products whose speed hangs on registers; the whole table is compiled by the slow test below."""
    _, kernels = resources.read_table()
    for name in ("sm90_up.cu", "sm90_down.cu"):
        source = resources.ROOT / "cuda" / name
        report = resources.compile_report(source, ("90a",))
        assert "serializ" not in report, report
        expected = [kernel for kernel in kernels if kernel.file == name and kernel.architecture == "90a"]
        assert resources.kernels_of(source, report) == expected


@needs_nvcc
@pytest.mark.slow
def test_whole_table():
    assert resources.all_kernels() == resources.read_table()[1]
