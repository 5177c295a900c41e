"""`python -m fmoe_ext.checkpoint`: the same as `fmoe checkpoint`, which cli.py is."""

from fmoe_ext._cli import run
from fmoe_ext.checkpoint.cli import main

run(main)
