from fmoe_ext._cli import run
from fmoe_ext.pipeline.cli import main

run(main)
