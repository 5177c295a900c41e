from fmoe_ext._cli import run
from fmoe_ext.checkpoint.cli import main

run(main)
