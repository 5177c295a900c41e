"""tests/leftovers.py itself: a run that leaves something behind says so, and fails where it is a process."""

import subprocess
import sys
import time
from pathlib import Path

import leftovers
import pytest

HERE = Path(__file__).parent
LEAVES_A_PROCESS = """
def test_leaves_a_process():
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("pid", "w") as file:
        file.write(str(sleeper.pid))
"""
LEAVES_A_FILE = """
def test_leaves_a_file():
    tempfile.mkdtemp(prefix="forgotten-")
"""
LEAVES_NOTHING = """
def test_leaves_nothing():
    with tempfile.TemporaryDirectory():
        subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (LEAVES_A_PROCESS, 1, "left behind by the tests: process "),
        (LEAVES_A_FILE, 0, "left behind by the tests: file "),
        (LEAVES_NOTHING, 0, None),
    ],
)
def test_leftovers_are_named(tmp_path, monkeypatch, content, code, text):
    monkeypatch.delenv(leftovers.MARK)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    file = tmp_path / "test_it.py"
    file.write_text(f"import subprocess, tempfile\n{content}")
    program = (
        f"import leftovers, pytest; leftovers.PATIENCE = 0.5; raise SystemExit(pytest.main([{str(file)!r}, "
    )
    program += f"'-p', 'leftovers', '-p', 'no:cacheprovider', '--rootdir', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert ("left behind" in done.stdout) == (text is not None) and (text or "") in done.stdout
    marked = [path for path in tmp_path.iterdir() if path.name.startswith("fmoe-")]
    assert not marked, "the folder of the run is gone with what was in it"
    if content is LEAVES_A_PROCESS:
        command = ["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()]
        for _ in range(100):  # a busy system ends a killed process later
            state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            if not state or state.startswith("Z"):
                break
            time.sleep(0.1)
        assert not state or state.startswith("Z"), "the process was not ended"
