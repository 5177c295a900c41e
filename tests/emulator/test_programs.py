"""Builds and runs the C++ test programs: plain with several seeds or many shapes, with few under the sanitizers."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import emu_build
import pytest

from tests import sanitized

SEEDS = {"tsan": "1", "asan": "1", "plain": "3"}
SHAPES = {"tsan": "40", "asan": "100", "plain": "500"}  # of test_shapes


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=sanitized.long_unless_passed()) for mode in SEEDS],
)
def test_programs(needs_compiler, mode):
    def run(path):
        counts = SHAPES if path.name == "test_shapes" else SEEDS
        return subprocess.run([str(path), counts[mode]], capture_output=True, text=True, timeout=1800)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [*pool.map(run, emu_build.build(mode, *emu_build.PROGRAMS))]
    for program, result in zip(emu_build.PROGRAMS, results, strict=True):
        assert result.returncode == 0, program + ":\n" + (result.stdout + result.stderr)[-6000:]
        assert result.stdout.startswith("ok"), program + ":\n" + result.stdout[-6000:]
