import sys

from fmoe_ext.balance.cli import main

if __name__ == "__main__":
    sys.exit(main())
