"""`python -m labkit` is the command line."""

from labkit.cli import main

main()
