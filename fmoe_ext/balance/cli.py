"""`fmoe balance report LOG...`: a page about the choices of a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fmoe_ext._cli import reason
from fmoe_ext.balance.page import render
from fmoe_ext.balance.report import summarize_logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command -> 0: written; 2: a log or the vocabulary cannot be read, or the page cannot be written."""
    parser = argparse.ArgumentParser(
        prog="fmoe balance", description="Shows which tokens chose which expert."
    )
    report = parser.add_subparsers(dest="command", required=True).add_parser(
        "report",
        help="write the HTML page",
        epilog="`make train ARGS=--choices` in a clone writes a log, and this page of it as out/lm/choices.html.",
    )
    report.add_argument("logs", nargs="+", type=Path, help="logs of balance.log_choices, one a rank")
    report.add_argument("-o", "--out", type=Path, default=Path("choices.html"), help="the page")
    report.add_argument(
        "--vocabulary", type=Path, help='JSON: {"text": id}, as tokenizers have it, or a list of texts'
    )
    report.add_argument(
        "--allow-truncated", action="store_true", help="read what is whole of a log that is cut off"
    )
    chosen = parser.parse_args(arguments)
    try:
        # {token id: text}, from either form of file
        vocabulary: dict[int, str] = {}
        if chosen.vocabulary is not None:
            try:
                content = json.loads(chosen.vocabulary.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{chosen.vocabulary} is no JSON: {error}") from None
            if isinstance(content, list) and all(isinstance(text, str) for text in content):
                vocabulary = dict(enumerate(content))
            elif isinstance(content, dict) and all(isinstance(number, int) for number in content.values()):
                vocabulary = {number: text for text, number in content.items()}
            else:
                raise ValueError(f"{chosen.vocabulary} must have a list of texts or {{text: id}}")
        # all is read before anything is written
        summary = summarize_logs(chosen.logs, allow_truncated=chosen.allow_truncated)
        page, out = render(summary, vocabulary), chosen.out
        if out.exists() and not out.is_file():  # a pipe or a device, as /dev/stdout: nothing to replace
            out.write_text(page, encoding="utf-8")
        else:
            # written beside an older page, then put in its place: without room for the new one the old one stays
            unfinished = out.with_name(f".{out.name}.{os.getpid()}.tmp")
            try:
                unfinished.write_text(page, encoding="utf-8")
                os.replace(unfinished, out)
            except OSError as error:
                unfinished.unlink(missing_ok=True)
                raise OSError(error.errno, error.strerror, str(out)) from None
    except (OSError, ValueError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 2
    print(f"{chosen.out}: {len(summary.steps)} steps, {len(summary.gates)} layers")
    return 0
