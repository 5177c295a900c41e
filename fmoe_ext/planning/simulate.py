"""`fmoe simulate`, and `python -m fmoe_ext.planning.simulate`: the planner's command about policies."""

import sys
from collections.abc import Sequence

from fmoe_ext._cli import run
from fmoe_ext.planning import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the expected times of each policy."""
    cli.main(["simulate", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    run(main)
