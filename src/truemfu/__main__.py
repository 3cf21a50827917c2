"""`python -m truemfu`: the same door as the `truemfu` command."""

from .cli import main

main()
