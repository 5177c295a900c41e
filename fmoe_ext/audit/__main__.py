"""`python -m fmoe_ext.audit`: the command `fmoe audit` without an installed script (cli.py)."""

from fmoe_ext._cli import run
from fmoe_ext.audit.cli import main

if __name__ == "__main__":
    run(main)
