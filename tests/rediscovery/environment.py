"""A virtual environment with other versions of a few packages; the rest comes from the environment of the tests."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = Path(__file__).parent / "recipes"
SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "TRANSFORMERS_VERBOSITY": "error"}


def make(folder, *packages):
    """The Python of a new environment in folder with the packages, or options of pip, installed."""
    venv.create(folder, with_pip=False)
    python = Path(folder, "bin", "python")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = Path(folder, "lib", version, "site-packages", "tests_environment.pth")
    path.write_text(sysconfig.get_paths()["purelib"])
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-build-isolation"]
    done = subprocess.run(
        [*command, *packages], env=os.environ | SETTINGS, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def audit(python, recipe):
    """(exit status, standard output, standard error) of the audit of a recipe file."""
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)}
    command = [str(python), "-m", "fmoe_ext.audit", f"{recipe}.py", "--json", "--timeout", "900"]
    done = subprocess.run(command, cwd=RECIPES, env=environment, capture_output=True, text=True, timeout=3000)
    return done.returncode, done.stdout, done.stderr
