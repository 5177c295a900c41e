"""tests/leftovers.py itself: a run that leaves something behind says so, and fails where it is a process."""

import os
import signal
import subprocess
import sys
import tempfile
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
WORKER_IS_KILLED = """
def test_ends_like_a_worker_that_is_killed():
    import atexit, multiprocessing.util, os
    atexit.register(os._exit, 0)  # before multiprocessing removes its folder
    with tempfile.NamedTemporaryFile(dir=multiprocessing.util.get_temp_dir()):
        pass
"""
LEAVES_NOTHING = """
def test_leaves_nothing():
    with tempfile.TemporaryDirectory():
        subprocess.run(["true"], check=True)
"""


@pytest.mark.parametrize(
    ("content", "workers", "code", "text"),
    [
        (LEAVES_A_PROCESS, 0, 1, "left behind by the tests: process "),
        (LEAVES_A_FILE, 0, 0, "left behind by the tests: file "),
        (WORKER_IS_KILLED, 1, 0, None),
        (LEAVES_NOTHING, 0, 0, None),
    ],
)
def test_leftovers_are_named(tmp_path, monkeypatch, content, workers, code, text):
    monkeypatch.delenv(leftovers.MARK)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    file = tmp_path / "test_it.py"
    file.write_text(f"import subprocess, tempfile\n{content}")
    program = (
        f"import leftovers, pytest; leftovers.PATIENCE = 0.5; raise SystemExit(pytest.main([{str(file)!r}, "
    )
    program += (
        f"'-p', 'leftovers', '-p', 'no:cacheprovider', '--rootdir', {str(tmp_path)!r}, '-n{workers}']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert ("left behind" in done.stdout) == (text is not None) and (text or "") in done.stdout
    marked = [path for path in tmp_path.iterdir() if path.name.startswith("fmoe-")]
    assert not marked, "the folder of the run is gone with what was in it"
    if content is LEAVES_A_PROCESS:
        command = ["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()]
        for _ in range(1200):  # a busy system ends a killed process later
            state = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            if not state or state.startswith("Z"):
                break
            time.sleep(0.1)
        assert not state or state.startswith("Z"), "the process was not ended"


@pytest.fixture
def short_path():
    """A folder whose name leaves room for that of a forkserver's socket, which has at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


LEAVES_A_FORKSERVER = """
PROGRAM = '''
import multiprocessing, multiprocessing.forkserver, os, signal
multiprocessing.get_context("forkserver").Process(target=print).start()
server = multiprocessing.forkserver._forkserver._forkserver_pid
os.kill(server, signal.SIGSTOP)  # as slow as a server can be
print(server)
os._exit(0)  # its temporary folder stays, as where a worker of pytest-xdist is killed
'''

def test_leaves_a_forkserver():
    with open("pid", "w") as file:
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=file, check=True)
"""


@pytest.mark.parametrize("ends", [True, False])
def test_process_that_was_asked_to_end_is_waited_for_and_fails_no_run(short_path, monkeypatch, ends):
    """Forkservers of workers were still ending after ten seconds, and a run without a failure ended with Error 1."""
    monkeypatch.delenv(leftovers.MARK)
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    file = short_path / "test_it.py"
    file.write_text(f"import subprocess, sys\n{LEAVES_A_FORKSERVER}")
    program = (
        f"import leftovers, pytest; leftovers.PATIENCE = 0.0; leftovers.PATIENCE_IF_ASKED = {600.0 * ends}; "
    )
    program += f"raise SystemExit(pytest.main([{str(file)!r}, '-p', 'leftovers', '-p', 'no:cacheprovider', "
    program += f"'--rootdir', {str(short_path)!r}]))"
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=short_path)
    lines = []
    for line in run.stdout:
        lines.append(line)
        if ends and "that were asked to end" in line:
            os.kill(int((short_path / "pid").read_text().split()[-1]), signal.SIGCONT)
    text = "".join(lines)
    assert run.wait(120) == 0 and "1 passed" in text, text
    assert "left behind by the tests: process" not in text and (ends or "pymp-" not in text), text
    assert ("waiting for" in text) == ends and ("killed 0 s after" in text) == (not ends), text
