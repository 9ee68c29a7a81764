"""`python -m lightning_solo.cli`: the same as the command `lightning-solo`."""

from lightning_solo.cli import main

main()
