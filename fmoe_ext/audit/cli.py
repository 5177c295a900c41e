"""`fmoe audit module:function`: train in every layout and compare with one process."""

import argparse
import sys
from collections.abc import Sequence

from fmoe_ext._cli import add_json, as_json, positive_float, positive_int
from fmoe_ext.audit.cases import ACCUMULATION, DTYPES, PADDING, RECOMPUTATION, AuditError
from fmoe_ext.audit.report import Result
from fmoe_ext.audit.run import audit


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        report = audit(
            options.recipe,
            layouts=options.layouts.split(","),
            accumulation=options.accumulation.split(","),
            recomputation=options.recomputation.split(","),
            padding=options.padding.split(","),
            dtypes=options.dtypes.split(","),
            steps=options.steps,
            timeout=options.timeout,
            progress=_say if options.verbose else None,
        )
    except AuditError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(report.as_dict()) if options.json else report)
    return 0 if report.ok else 1


def _say(result: Result) -> None:
    verdict = result.label if result.ok else f"{result.label}: {result.why()}"
    print(f"{result.case}: {verdict} ({result.seconds:.1f} s)", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fmoe audit",
        description="Trains a model in every layout, against one process on the whole batch.",
        epilog="Exit status: 0 all equal, 1 something differs, 2 it cannot be run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("recipe", help="module:function or file.py:function that returns a fmoe_ext.audit.Recipe")
    add(
        "--layouts", default="1,dp2,ep2,dp2xep2", help="of ranks, joined by commas: 1, dp2, ep2, dp2xep2, ..."
    )
    add("--accumulation", default=",".join(ACCUMULATION), help="microbatches of a step")
    add("--recomputation", default=",".join(RECOMPUTATION), help="kinds of activation checkpointing")
    add("--padding", default=",".join(PADDING), help="sides that sequences are padded on")
    add("--dtypes", default=",".join(DTYPES), help="of the model")
    add("--steps", type=positive_int, default=2, help="of the optimizer, in each case")
    add("--timeout", type=positive_float, default=60.0, help="seconds for one case")
    add("--verbose", action="store_true", help="a line for each case, when it is done")
    add_json(parser)
    return parser
