"""Python programs as processes of their own, forked from the server of the pools, which has imported torch once."""

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch


def run_python(code, *arguments, cwd=None, env=None, timeout=120.0):
    """Return what subprocess.run([sys.executable, "-c", code, *arguments]) does, with the text of both streams.

    fmoe_ext and torch are imported already: a program that is about their import needs a new interpreter.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        process = start_python(code, *arguments, streams=streams, cwd=cwd, env=env)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, timeout)
        texts = [stream.read_text() if stream.exists() else "" for stream in streams]
        return subprocess.CompletedProcess(code, process.exitcode, *texts)


def start_python(code, *arguments, streams, cwd=None, env=None):
    """Start a program whose output and errors go to the two paths `streams`, files or named pipes -> its process."""
    paths = [*map(str, streams)]
    given = (code, [*map(str, arguments)], str(cwd or os.getcwd()), dict(env or os.environ), paths)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=given)
    process.start()
    return process


def run_file(path, *arguments, **options):
    """run_python() of a program's file."""
    program = (
        f"import os, runpy, sys; path = sys.argv[0] = {str(path)!r}; sys.path[0] = os.path.dirname(path);"
    )
    return run_python(program + "runpy.run_path(path, None, '__main__')", *arguments, **options)


def _run(code, arguments, cwd, env, streams):
    atexit._clear()  # the server's
    gc.freeze()
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = ["-c", *arguments]
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), program.__dict__)
    finally:
        atexit._run_exitfuncs()
