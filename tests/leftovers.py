"""A pytest plugin: the run fails if a process that it started outlives it, and with it any port that is still open;
files that stay in TMPDIR are named and removed.

Every process of the run has the run's mark in its environment, however deep it is and whichever its parent is now.

Helpers of multiprocessing and workers of pytest-xdist end when the pipe closes on which they listen, and on a busy
machine that takes its time. So a process whose pipe nobody can write to any more has been asked to end: it is waited
for, and after a minute it is killed with a note. Only one that nobody has asked fails the run.
"""

import contextlib
import getpass
import multiprocessing.process
import multiprocessing.util
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest

MARK = "FMOE_TESTS_FOLDER"  # the run's own temporary folder
SOCKETS = "FMOE_TESTS_SOCKETS"  # multiprocessing's
END_WITH_US = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
OF_INDUCTOR = f"torchinductor_{getpass.getuser()}"  # part of its cache, whatever TORCHINDUCTOR_CACHE_DIR says
PATIENCE = 10.0  # seconds for processes that nobody has asked to end
PATIENCE_IF_ASKED = 60.0  # seconds for the others
# The command of multiprocessing's helpers ends in main(pipe) or main(socket, pipe, ...).
LISTENS_ON = re.compile(r"from multiprocessing\.\w+ import main; ?main\((?:\d+, ?)?(\d+)")


def pytest_configure(config):
    if hasattr(config, "workerinput") and SOCKETS in os.environ:
        # pytest-xdist kills a worker that is not gone after 10 s, and then a folder of the worker's own would stay
        multiprocessing.process.current_process()._config["tempdir"] = os.environ[SOCKETS]
    if MARK in os.environ or config.option.collectonly:
        return  # a worker of pytest-xdist, or a run inside a run
    # multiprocessing's own, which goes when this process ends; of its workers too
    os.environ[SOCKETS] = multiprocessing.util.get_temp_dir()
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
        writer = session.config.get_terminal_writer()
        begin = last_asked = time.monotonic()
        is_said = False
        while processes := processes_with(f"{MARK}={self.folder}"):
            now, asked = time.monotonic(), asked_to_end(processes)
            if asked and now - begin < PATIENCE_IF_ASKED:
                last_asked = now
            elif now - last_asked >= PATIENCE:  # the others may have waited for those that were asked
                break
            if asked and not is_said:
                writer.line(f"waiting for {len(asked)} processes that were asked to end")
                writer.flush()
                is_said = True
            time.sleep(0.1)
        asked = asked_to_end(processes)
        found = [f"process {pid}: {command}" for pid, command in processes.items() if pid not in asked]
        is_failed = bool(found)
        found += [
            f"file {path}"
            for path in Path(self.folder).iterdir()
            # multiprocessing's own folder goes with its process, unless that is killed
            if path.name != OF_INDUCTOR and not (asked and path.name.startswith("pymp-"))
        ]
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)
        for pid in asked:
            text = (
                f"killed {PATIENCE_IF_ASKED:g} s after it was asked to end: process {pid}: {processes[pid]}"
            )
            writer.line(text, yellow=True)
        for text in found:
            writer.line(f"left behind by the tests: {text}", red=True)
        if is_failed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return result


def asked_to_end(processes):
    """The ids of processes that listen on a pipe to which nobody writes any more, but others that were asked to end."""
    writers, listens = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        named = LISTENS_ON.search(processes.get(pid, ""))
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            for file in (folder / "fd").iterdir():
                if not (pipe := os.readlink(file)).startswith("pipe:"):
                    continue
                if file.lstat().st_mode & stat.S_IWUSR:
                    writers.setdefault(pipe, set()).add(pid)
                elif pid in processes and file.name == (named[1] if named else "0"):
                    listens[pid] = pipe
    with contextlib.suppress(
        OSError
    ):  # a pipe into the run itself says nothing about processes that share it
        ours = os.readlink("/proc/self/fd/0")
        listens = {pid: pipe for pid, pipe in listens.items() if pipe != ours}
    asked = set(listens)
    while unasked := {pid for pid in asked if writers.get(listens[pid], set()) - asked}:
        asked -= unasked
    return asked


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
