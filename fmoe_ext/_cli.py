"""Parts that all commands share: checked numbers, exit statuses, errors without tracebacks.

fmoe_ext_command.py gives run() the main() of a command.

Exit statuses (docs/commands.md):
    0    done
    1    done, and something is wrong (values differ, a kernel failed)
    2    could not be done (arguments, files, devices, packages)
    3    a server has stopped and not all is saved
    4    another server runs with this identity or checkpoint folder
    130  interrupted
    141  nobody reads the output
"""

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

CANNOT, NOT_SAVED, IN_USE = 2, 3, 4  # exit statuses


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def not_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def reason(error: BaseException) -> str:
    """Return the text of an error on one line, always the same for a file that is missing."""
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{os.fspath(error.filename)} does not exist"
    return " ".join(str(error).split())


def as_json(facts: Any) -> str:
    """Write facts as --json prints them."""
    return json.dumps(facts, indent=1, default=str)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json; as_json() then makes the output."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the status of main(); `sys.exit(text)` in it prints the text and exits with 2."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()  # a closed pipe raises here, and not at the interpreter's exit
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)
        status = CANNOT
    sys.exit(status)
