"""Libraries that the built CUDA module needs; the CUDA libraries come with the torch that loads it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import fmoe_ext

MODULE = Path(fmoe_ext.__file__).parent / "_C_cuda.abi3.so"


@pytest.mark.skipif(not MODULE.exists(), reason="_C_cuda was not built (make cuda)")
@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf was not found")
def test_libraries():
    dynamic = subprocess.run(
        ["readelf", "-d", str(MODULE)], capture_output=True, text=True, check=True
    ).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(\S+)\]", dynamic))
    # A CUDA torch's libtorch.so brings libtorch_cuda.so, where the current stream is asked for.
    assert "libtorch.so" in needed
    # Built under a CPU torch for any CUDA torch: neither a toolkit's nor a driver's library by version.
    assert not any(name.startswith(("libcudart", "libcuda.", "libtorch_cuda")) for name in needed), needed
