"""The workflows in .github, which only GitHub runs: they are of its schema, and zizmor finds nothing wrong in them."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DEPENDABOT = ROOT / ".github" / "dependabot.yml"


def assert_passes(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("schema, files", [("github-workflows", WORKFLOWS), ("dependabot", [DEPENDABOT])])
def test_schema(schema, files):
    pytest.importorskip(
        "check_jsonschema", reason="needs check-jsonschema, which is in requirements-test.txt"
    )
    assert_passes(sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_actions_are_pinned_and_keep_no_token():
    zizmor = Path(sysconfig.get_path("scripts"), "zizmor")
    if not zizmor.exists():
        pytest.skip("needs zizmor, which is in requirements-test.txt")
    assert_passes(zizmor, "--quiet", "--offline", *WORKFLOWS, DEPENDABOT)


def test_ci_runs_every_promised_python_and_the_oldest_torch():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    project = (ROOT / "pyproject.toml").read_text()
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert jobs["all"]["strategy"]["matrix"]["python"] == promised
    floor = re.search(r'"torch>=([\d.]+)"', project)[1]
    assert jobs["torch"]["strategy"]["matrix"]["torch"] == [f"torch=={floor}.*", "torch"]
