from fmoe_ext._cli import run
from fmoe_ext.planning.cli import main

run(main)
