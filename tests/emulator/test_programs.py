"""Builds and runs the C++ test programs: plain with several seeds, and once each under the sanitizers."""

import subprocess

import emu_build
import pytest

RUNS = [(program, "plain", "3") for program in emu_build.PROGRAMS]
RUNS += [(program, mode, "1") for program in emu_build.PROGRAMS for mode in ("asan", "tsan")]


@pytest.mark.parametrize(("program", "mode", "seeds"), RUNS)
def test_program(needs_compiler, program, mode, seeds):
    (path,) = emu_build.build(mode, program)
    result = subprocess.run([str(path), seeds], capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert result.stdout.startswith("ok"), result.stdout[-6000:]
