"""The wheel in dist/, which `make wheel` has just built: what is in it, and that it works where only torch is.

FMOE_WHEEL_PYTHONS=/path/python3.10:/path/python3.13 tries it with these interpreters too: each must have torch.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "fmoe_ext" / "__init__.py").read_text()  # the package here may not be built
VERSION = re.search(r'__version__ = "(.+)"', SOURCE)[1]
LARGEST = {1: 8 << 20, 2: 16 << 20}  # bytes, by the number of native modules: two with CUDA kernels
PYTHON_SYMBOLS = {"PyModule_Create2"}  # of the limited API since 3.2
PYTHONS = [sys.executable, *filter(None, os.environ.get("FMOE_WHEEL_PYTHONS", "").split(os.pathsep))]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel():
    wheels = sorted(ROOT.glob("dist/*.whl"))
    if not wheels:
        pytest.skip("there is no wheel in dist: run `make wheel`")
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def output_of(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def test_one_wheel_for_every_python_and_torch(wheel):
    name = rf"fmoe_ext-{re.escape(VERSION)}-cp310-abi3-manylinux_2_\d+_(x86_64|aarch64)\.whl"
    assert re.fullmatch(name, wheel.name), wheel.name


def test_contents(wheel, unpacked):
    """The modules and headers, one native module, and what describes them; no tests, no sources, no libraries."""
    parts = [path for suffix in ("py", "h", "cmake") for path in (ROOT / "fmoe_ext").rglob(f"*.{suffix}")]
    package = {path.relative_to(ROOT) for path in parts} | {
        Path("fmoe_ext/py.typed"),
        Path("fmoe_ext_command.py"),
        Path("fmoe_ext_pytest.py"),
    }
    files = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file()}
    described = {path for path in files if path.parts[0] == f"fmoe_ext-{VERSION}.dist-info"}
    native = {path for path in files - described if path.suffix == ".so"}
    assert files - described - native == package
    assert {path.name for path in native} <= {"_C.abi3.so", "_C_cuda.abi3.so"}
    assert {"METADATA", "RECORD", "LICENSE", "entry_points.txt"} <= {path.name for path in described}
    assert wheel.stat().st_size < LARGEST[len(native)]


def test_native_module_needs_the_limited_api_only(unpacked):
    for path in (unpacked / "fmoe_ext").glob("*.so"):
        symbols = re.findall(r" U (_?Py\w+)", output_of("nm", "-D", "--undefined-only", str(path)))
        assert set(symbols) <= PYTHON_SYMBOLS, path.name


@pytest.mark.parametrize("python", PYTHONS)
def test_in_an_empty_environment(wheel, tmp_path, python):
    """A new environment with the wheel and that Python's torch: nothing of the sources can be found from there."""
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    torch_of_it = output_of(python, "-c", "import torch; print(torch.__file__)", cwd=tmp_path)
    env = {**os.environ, "PYTHONPATH": str(Path(torch_of_it).parent.parent)}
    python = tmp_path / "env" / "bin" / "python"
    output_of(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    where = output_of(python, "-c", "import fmoe_ext; print(fmoe_ext.__file__)", cwd=tmp_path, env=env)
    assert Path(where.strip()).is_relative_to(tmp_path)
    report = output_of(python, "-m", "fmoe_ext.info", cwd=tmp_path, env=env)
    assert re.search(r"fmoe_ext\._C +loaded", report)
    assert re.search(rf"built with torch +{re.escape(torch.__version__)}\n", report)
    assert "as by hand" in output_of(python, ROOT / "tests" / "wheel_smoke.py", cwd=tmp_path, env=env)
