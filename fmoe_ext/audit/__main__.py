from fmoe_ext._cli import run
from fmoe_ext.audit.cli import main

if __name__ == "__main__":
    run(main)
