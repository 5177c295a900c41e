"""The workflows in .github, which only GitHub runs: they are of its schema, and zizmor finds nothing wrong in them."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parent.parent / ".github" / "workflows").glob("*.yml"))


def assert_passes(*command: str | Path) -> None:
    result = subprocess.run([*command, *WORKFLOWS], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_schema():
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema, which is in requirements.txt")
    assert_passes(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows")


def test_actions_are_pinned_and_keep_no_token():
    zizmor = Path(sysconfig.get_path("scripts"), "zizmor")
    if not zizmor.exists():
        pytest.skip("needs zizmor, which is in requirements.txt")
    assert_passes(zizmor, "--quiet", "--offline")
