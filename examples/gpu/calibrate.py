"""Measures the device for later plans, as `lightning-solo plan --calibrate --json` does."""

import sys

from lightning_solo.cli import main

if __name__ == "__main__":
    sys.argv[1:] = ["plan", "--calibrate", "--json"]
    sys.exit(main())
