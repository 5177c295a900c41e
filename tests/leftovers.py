"""A pytest plugin: the run fails if a process that it started outlives it, and with it any port that is still open;
files that stay in TMPDIR are named and removed.

Every process of the run has the run's mark in its environment, however deep it is and whichever its parent is now.
"""

import getpass
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

MARK = "FMOE_TESTS_FOLDER"  # the run's own temporary folder
END_WITH_US = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
OF_INDUCTOR = f"torchinductor_{getpass.getuser()}"  # part of its cache, whatever TORCHINDUCTOR_CACHE_DIR says
PATIENCE = 10.0  # seconds for processes to end


def pytest_configure(config):
    if MARK in os.environ or config.option.collectonly:
        return  # a worker of pytest-xdist, or a run inside a run
    multiprocessing.util.get_temp_dir()  # multiprocessing's own, which goes when this process ends
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest keeps its last three folders there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(usual, f"torchinductor_{os.getuid()}")))
    tempfile.tempdir = os.environ[MARK] = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="fmoe-")
    config.pluginmanager.register(Leftovers(tempfile.tempdir), "leftovers-of-the-run")


class Leftovers:
    def __init__(self, folder):
        self.folder = folder

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        result = yield
        deadline = time.monotonic() + PATIENCE
        while (processes := processes_with(f"{MARK}={self.folder}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        found = [f"process {pid}: {command}" for pid, command in processes.items()]
        found += [f"file {path}" for path in Path(self.folder).iterdir() if path.name != OF_INDUCTOR]
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        for text in found:
            session.config.get_terminal_writer().line(f"left behind by the tests: {text}", red=True)
        if processes and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def processes_with(setting):
    """{id: command} of the processes that were started with this setting, multiprocessing's own of this one aside."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has just ended, or is another user's
        of_ours = parent == os.getpid() and any(module in command for module in END_WITH_US)
        if setting.encode() in environment and command and not of_ours and folder.name != str(os.getpid()):
            found[int(folder.name)] = command
    return found
