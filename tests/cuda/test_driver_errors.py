"""Errors of the Hopper launchers that do not get a function of the driver; nvcc compiles them into a program."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests import sanitized

pytestmark = sanitized.long_unless_passed()  # nvcc takes half a minute
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
#include <cstdio>

#include "sm90_host.cuh"

int main() {
  try {
    fmoe_ext::driver_function<void (*)()>("cuNoSuchFunction", 12000);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found")
def test_failure_of_the_runtime_is_not_blamed_on_the_version(tmp_path):
    """Without a driver the runtime fails, as it does after a kernel that failed; with one, it is the name."""
    (tmp_path / "ask.cu").write_text(PROGRAM)
    folders = (f"-I{ROOT / folder}" for folder in ("cuda", "csrc"))
    command = ["nvcc", "-std=c++20", "-arch=sm_90a", *folders, "ask.cu", "-o", "ask"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600)
    said = subprocess.run([tmp_path / "ask"], capture_output=True, text=True, check=True).stdout
    if torch.cuda.is_available():
        assert said.startswith("fmoe_ext: the CUDA driver has no cuNoSuchFunction: a driver for CUDA 12.0")
    else:
        assert said.startswith("fmoe_ext: asking the CUDA driver for cuNoSuchFunction failed: ")
        assert "newer is needed" not in said
