"""Servers as real processes, started in no time: one process imports everything (torch takes seconds) and forks.

The lines that it reads and writes are JSON: {"start": module, "flags": [...], "log": path} -> {"pid": number};
{"poll": pid} -> {"code": exit status, minus the signal that killed it, or null}. It ends, with all it started, at
the end of its input.
"""

import contextlib
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

SERVER, DHT_NODE = "fmoe_ext.remote.server.main", "fmoe_ext.remote.dht.main"


class Zygote:
    """The process that forks."""

    def __init__(self):
        command = [sys.executable, __file__]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def ask(self, **question):
        with self._lock:
            self._popen.stdin.write(json.dumps(question) + "\n")
            self._popen.stdin.flush()
            return json.loads(self._popen.stdout.readline())

    def close(self):
        self._popen.stdin.close()
        self._popen.wait(120)


class Process:
    """A command of the package in a process of its own, its lines in a file."""

    def __init__(self, zygote, path, module, *flags):
        self.path, self._zygote = path, zygote
        self.pid = zygote.ask(start=module, flags=[str(flag) for flag in flags], log=str(path))["pid"]

    def poll(self):
        """The exit status; None while it runs."""
        return self._zygote.ask(poll=self.pid)["code"]

    def wait(self, seconds=120):
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < end, f"runs on after {seconds} s: {self.path.read_text()}"
            time.sleep(0.02)
        return code

    def wait_for(self, pattern, seconds=120):
        """The match of a pattern in what it has printed."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.path.read_text() if self.path.exists() else "")):
            assert time.monotonic() < end and self.poll() is None, self.path.read_text()
            time.sleep(0.02)
        return found

    def endpoint(self):
        return self.wait_for(r"Server started at (\S+)")[1]

    def end(self, number=signal.SIGTERM, seconds=120):
        os.kill(self.pid, number)
        return self.wait(seconds)


def main():
    for module in (SERVER, DHT_NODE, "torch._dynamo"):  # optimizers import it
        importlib.import_module(module)
    gc.freeze()
    codes = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            answer = {"pid": fork(question)}
            codes[answer["pid"]] = None
        else:
            answer = {"code": status(question["poll"], codes)}
        print(json.dumps(answer), flush=True)
    for pid in codes:
        if status(pid, codes) is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os._exit(0)  # torch takes its time to leave


def fork(question):
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException), open(question["log"], "w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = 1
        try:
            code = importlib.import_module(question["start"]).main(question["flags"])
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os._exit(1)


def status(pid, codes):
    """The exit status, asked for until it is known."""
    if codes[pid] is None:
        ended, how = os.waitpid(pid, os.WNOHANG)
        codes[pid] = os.waitstatus_to_exitcode(how) if ended else None
    return codes[pid]


if __name__ == "__main__":
    main()
