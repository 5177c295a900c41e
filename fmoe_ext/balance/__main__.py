"""`python -m fmoe_ext.balance`: the command `fmoe balance`."""

from fmoe_ext._cli import run
from fmoe_ext.balance.cli import main

if __name__ == "__main__":
    run(main)
