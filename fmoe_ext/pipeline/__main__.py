"""`python -m fmoe_ext.pipeline`: the command `fmoe pipeline` (planning/cli.py)."""

from fmoe_ext._cli import run
from fmoe_ext.planning.cli import main

run(main)
