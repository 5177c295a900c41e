"""python -m fmoe_ext.pipeline plan: which layout a model should train in."""

from fmoe_ext._cli import run
from fmoe_ext.pipeline.cli import main

run(main)
