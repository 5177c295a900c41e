"""What all commands share: numbers that are refused where they are read, and ends without a traceback."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


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


def run(main: Callable[[], int | None]) -> NoReturn:
    """sys.exit(main()), with a shell's status for Ctrl-C (130) and for output that nobody reads any more (141)."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes once more when it ends
        status = 128 + signal.SIGPIPE
    sys.exit(status)
