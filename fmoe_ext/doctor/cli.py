"""`fmoe doctor file.py:make`: check the invariants of a MoE model."""

import argparse
import sys
from collections.abc import Sequence

from fmoe_ext._cli import add_json, as_json
from fmoe_ext.audit.cases import AuditError
from fmoe_ext.doctor.examine import check
from fmoe_ext.doctor.subject import read


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a model -> 0: no invariant is violated; 1: one is, or none could be decided; 2: it cannot be examined."""
    parser = argparse.ArgumentParser(
        prog="fmoe doctor",
        description="Check the invariants of a MoE model, ours or not, without a second implementation.",
        epilog="Exit status: 0 no invariant is violated, 1 one is, or none could be decided, 2 the model cannot be "
        "examined.",
    )
    parser.add_argument(
        "model",
        help="file.py:make or module:make, returning (model, batch) or a Subject; or a folder of Transformers, or a "
        "model's name in the cache of the Hugging Face hub",
    )
    add_json(parser)
    options = parser.parse_args(arguments)
    try:
        report = check(read(options.model))
    except AuditError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # of the model, whatever it is
        text = " ".join(str(error).split())[:300]
        print(f"error: the model cannot be examined: {type(error).__name__}: {text}", file=sys.stderr)
        return 2
    print(as_json(report.as_dict()) if options.json else report)
    return 0 if report.ok else 1
