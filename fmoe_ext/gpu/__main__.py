"""`python -m fmoe_ext.gpu`: the command `fmoe gpu` (cli.py)."""

from fmoe_ext._cli import run
from fmoe_ext.gpu.cli import main

if __name__ == "__main__":
    run(main)
