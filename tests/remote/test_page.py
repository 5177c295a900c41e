"""The commands of docs/remote.md: every server starts as the page says, programs train through it, SIGTERM ends it."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, run_python
from tests.ports import free_port

PAGE = ROOT / "docs/remote.md"
PROGRAMS = Path(sys.executable).parent


class Machine:
    """This machine in the place of those of the page: free ports, its own address."""

    def __init__(self, folder, etcd):
        self.folder, self.started, self.config = folder, [], ""
        self.names = {"host:2379": etcd, "192.168.1.10": "127.0.0.1", "10.0.0.5": "127.0.0.1"}
        self.names |= {port: str(free_port()) for port in ("1337", "1338", "1340")}

    def here(self, code):
        for name, own in self.names.items():
            code = code.replace(name, own)
        return code

    def start(self, command):
        """Start a server, in a folder of its own as on a machine of its own, and wait until it says so."""
        command = self.here(re.sub(r"\s+#.*", "", command))
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        log = folder / "log"
        if "server.yml" in command:
            folder.joinpath("server.yml").write_text(self.config)
        with log.open("w") as out:
            words = ["bash", "-c", f"exec {PROGRAMS}/{command}"]
            process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        self.started.append((process, log))
        ready = "Server started at" if command.startswith("fmoe-server") else "listens"
        end = time.monotonic() + 120
        while ready not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, command + "\n" + log.read_text()
            time.sleep(0.05)

    def stop(self):
        """SIGTERM to all; each must end well."""
        for process, log in reversed(self.started):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, 3), log.read_text()
        self.started.clear()

    def kill(self):
        for process, _ in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def machine(tmp_path, etcd):
    machine = Machine(tmp_path, etcd)
    yield machine
    machine.kill()


@pytest.mark.long
def test_servers_and_programs_of_the_page_run_in_its_order(machine, monkeypatch):
    monkeypatch.chdir(machine.folder)
    names, started = {"__name__": "__main__"}, 0
    for language, code, line in blocks(PAGE):
        if language == "yaml":
            machine.config = machine.here(code)
        elif language == "sh" and re.search(r"^fmoe-(server|dht) ", code, re.MULTILINE):
            machine.stop()
            for command in code.replace("\\\n", " ").splitlines():
                if not command.startswith("#"):
                    machine.start(command)
                    started += 1
        elif language == "python":
            run_python(machine.here(code), PAGE, line, names)
            if "dht.shutdown()" not in code:
                assert names["moe"](names["x"]).shape == names["x"].shape
    machine.stop()
    assert started == 8
