"""The pages of the documentation, and what runs the code on them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
# The site's and README; docs/history is a diary that names what there was.
PAGES = [ROOT / "README.md", *sorted(p for p in ROOT.glob("docs/**/*.md") if p.parent.name != "history")]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path):
    """(language, code, line number) of every fenced block of a page."""
    text = path.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2], text[: match.start()].count("\n") + 2


def run_python(code, path, line, names):
    exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)  # so that a traceback names the line


def commands_of(code):
    """(command, exit status) of a block: lines without comments, continued ones joined; a comment says a status."""
    for line in code.replace("\\\n", "").splitlines():  # as a shell joins them
        status = re.search(r"# exit code (\d)", line)
        command = re.sub(r"\s+", " ", re.sub(r"(^|\s+)#.*", "", line)).strip()
        if command:
            yield command, 0 if status is None else int(status[1])


def run_command(command, folder, status=0):
    """fmoe's own runs in a process forked from one that has imported Transformers, which takes six seconds a time."""
    if not command.startswith("fmoe ") or re.search(r"[$&*;<>|]", command):
        return run_shell(f"code=0\n{{ {command}\n}} || code=$?\n[ $code = {status} ]", folder)
    program = "import sys, fmoe_ext_command; sys.argv[0] = 'fmoe'; fmoe_ext_command.main()"
    env = {**os.environ, "TMPDIR": str(folder)}
    done = forked.run_python(program, *shlex.split(command)[1:], cwd=folder, env=env, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    print(done.stdout)


def run_shell(code, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "TMPDIR": str(folder)}  # torchrun leaves its logs there
    done = subprocess.run(
        ["bash", "-euc", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
