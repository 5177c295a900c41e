"""What all commands share: how they end."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fmoe_ext import info
from fmoe_ext.audit.cases import AuditError, Layout, parse_layout
from fmoe_ext.audit.cli import main as audit
from fmoe_ext.gpu.cli import main as gpu

ROOT = Path(__file__).resolve().parent.parent
# fmoe_ext/_cli.py by itself: a process that need not import torch
PROGRAM = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cli", {str(ROOT / "fmoe_ext" / "_cli.py")!r})
cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cli)
"""
INTERRUPTED = "def main(): raise KeyboardInterrupt"


@pytest.mark.parametrize(
    "body, status, message",
    [
        ("def main(): print('read by nobody')", 128 + signal.SIGPIPE, b""),
        ("def main(): print('help'); sys.exit(0)", 128 + signal.SIGPIPE, b""),
        (INTERRUPTED, 128 + signal.SIGINT, b"interrupted\n"),
        ("def main(): return 2", 2, b""),
        ("def main(): sys.exit('error: why')", 1, b"error: why\n"),
    ],
)
def test_ends_without_a_traceback(body, status, message):
    command = [sys.executable, "-c", f"{PROGRAM}\n{body}\ncli.run(main)"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    program.stdout.close()
    with program.stderr:
        assert program.stderr.read() == message
    assert program.wait() == status


@pytest.mark.parametrize(
    "main, arguments, message",
    [
        (audit, ["m:f", "--steps", "0"], "argument --steps: 0 is not a positive number"),
        (audit, ["m:f", "--timeout", "-1"], "argument --timeout: -1 is not a positive number"),
        (gpu, ["prove", "--limit", "nan"], "argument --limit: nan is not a positive number"),
        (gpu, ["prove", "--budget", "-1"], "argument --budget: -1 is not a positive number"),
    ],
)
def test_numbers_that_cannot_be(main, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_layout_without_number_is_refused():
    """ "x" was one process."""
    for layout in ("x", "dp2x", "xep2"):
        with pytest.raises(AuditError, match=f"dp2xep2 or the like, but got '{layout}'"):
            parse_layout(layout)
    assert parse_layout("dp2xep3") == Layout(2, 3) and parse_layout("ep3") == Layout(1, 3)


def test_info_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["info", "unknown"])
    with pytest.raises(SystemExit, match="2"):
        info.main()
    assert "unrecognized arguments: unknown" in capsys.readouterr().err
