"""`python -m fmoe_ext.checkpoint inspect|merge|convert PATH`."""

from fmoe_ext.checkpoint.cli import main

main()
