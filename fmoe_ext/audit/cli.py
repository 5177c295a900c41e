"""`fmoe audit module:function`: train in every layout and compare with one process; or compare a rollout."""

import argparse
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from fmoe_ext._cli import add_json, as_json, positive_float, positive_int
from fmoe_ext.audit.cases import ACCUMULATION, DTYPES, PADDING, RECOMPUTATION, AuditError
from fmoe_ext.audit.report import AuditReport, PlanReport, Result
from fmoe_ext.audit.rollout import RolloutReport, audit_rollout
from fmoe_ext.audit.run import audit, audit_plan
from fmoe_ext.audit.source import load_model

# {option: (default, help)}
_AXES = MappingProxyType(
    {
        "layouts": ("1,dp2,ep2,dp2xep2", "of ranks, joined by commas: 1, dp2, ep2, dp2xep2, ..."),
        "accumulation": (",".join(ACCUMULATION), "microbatches of a step"),
        "recomputation": (",".join(RECOMPUTATION), "kinds of activation checkpointing"),
        "padding": (",".join(PADDING), "sides that sequences are padded on"),
        "dtypes": (",".join(DTYPES), "of the model"),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare -> 0: all equal; 1: something differs; 2: it cannot be run."""
    parser = argparse.ArgumentParser(
        prog="fmoe audit",
        description="Trains a model in every layout, or under a parallel plan, against one process.",
        epilog="Exit status: 0 all equal, 1 something differs, 2 it cannot be run.",
    )
    add = parser.add_argument
    add(
        "recipe",
        help="module:function or file.py:function that returns a fmoe_ext.audit.Recipe; "
        "or a module or file.py that defines model() and parallelize(model, rank, world); with --rollout a "
        "model of Transformers, or module:function that returns a model or (model, tokens)",
    )
    for name, (default, text) in _AXES.items():
        add(f"--{name}", help=f"{text} (default: {default})")
    add("--world", type=positive_int, help="ranks of a plan (default: the file's, or 2)")
    add("--steps", type=positive_int, help="of the optimizer (default: 2, or a plan file's)")
    add("--timeout", type=positive_float, help="seconds for one case (default: 60), or for a plan (300)")
    add("--rollout", action="store_true", help="compare generated log-probabilities with those of training")
    add("--text", help="of a rollout, for the tokenizer of the model (default: random tokens)")
    add("--verbose", action="store_true", help="a line for each case, when it is done")
    add_json(parser)
    options = parser.parse_args(arguments)

    def say(result: Result) -> None:
        verdict = result.label if result.ok else f"{result.label}: {result.why()}"
        print(f"{result.case}: {verdict} ({result.seconds:.1f} s)", file=sys.stderr)

    report: AuditReport | PlanReport | RolloutReport
    try:
        if options.rollout:
            of_training = (*_AXES, "world", "steps", "timeout")
            if given := [f"--{n}" for n in of_training if getattr(options, n) is not None]:
                raise AuditError(f"{', '.join(given)} are of a training; a rollout has none")
            report = audit_rollout(*load_model(options.recipe, options.text))
        elif options.text is not None:
            raise AuditError("--text is of a rollout: give --rollout too")
        elif ":" in options.recipe:  # a Recipe, in the built-in layouts
            if options.world is not None:
                raise AuditError("--world is for a file with parallelize(); a Recipe is audited in --layouts")
            axes: dict[str, Any] = {
                name: (getattr(options, name) or default).split(",") for name, (default, _) in _AXES.items()
            }
            report = audit(
                options.recipe,
                **axes,
                steps=options.steps or 2,
                timeout=options.timeout or 60.0,
                progress=say if options.verbose else None,
            )
        else:  # a file with a plan of its own
            if given := [f"--{name}" for name in _AXES if getattr(options, name) is not None]:
                raise AuditError(
                    f"{', '.join(given)} are for a Recipe, file.py:function; a plan runs as it is"
                )
            changes = {name: getattr(options, name) for name in ("world", "steps") if getattr(options, name)}
            report = audit_plan(options.recipe, timeout=options.timeout or 300.0, **changes)
    except AuditError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(report.as_dict()) if options.json else report)
    return 0 if report.ok else 1
