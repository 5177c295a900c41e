"""Builds and runs the C++ test programs: plain with several seeds or many shapes, with few under the sanitizers."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import emu_build
import pytest

SEEDS = {
    "tsan": "1",
    "asan": "1",
    "plain": "3",
}  # the slowest first, so that it runs while the others are built
SHAPES = {"tsan": "40", "asan": "100", "plain": "500"}  # of test_shapes
RUNS = [(program, mode) for mode in SEEDS for program in emu_build.PROGRAMS]


@pytest.fixture(scope="module")
def started(needs_compiler, request):
    """{(program, mode): the future of its run}; a mode's programs run while the next mode is built."""
    chosen = [item.callspec.params for item in request.session.items if item.function is test_program]
    futures = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mode in SEEDS:
            programs = [run["program"] for run in chosen if run["mode"] == mode]
            if not programs:
                continue
            for program, path in zip(programs, emu_build.build(mode, *programs), strict=True):
                counts = SHAPES if program == "test_shapes" else SEEDS
                command = [str(path), counts[mode]]
                futures[program, mode] = pool.submit(
                    subprocess.run, command, capture_output=True, text=True, timeout=1800
                )
        yield futures


@pytest.mark.slow
@pytest.mark.parametrize(("program", "mode"), RUNS)
def test_program(started, program, mode):
    result = started[program, mode].result()
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert result.stdout.startswith("ok"), result.stdout[-6000:]
