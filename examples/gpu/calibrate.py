"""Measures the device for later plans, as `lightning-solo plan --calibrate --json` does; small, in one process."""

import json
import sys

import torch
from result import SMALL

from lightning_solo.cli import main
from lightning_solo.planner.calibrate import held_after_training, speeds
from lightning_solo.planner.device import this_device


def small() -> int:
    """Print what does not need a second process beside this one on the device."""
    device, on = this_device(), torch.device("cuda")
    print(json.dumps({**held_after_training(device, on), **speeds(device, on, width=64, copied=2**20)}))
    return 0


if __name__ == "__main__":
    sys.argv[1:] = ["plan", "--calibrate", "--json"]
    sys.exit(small() if SMALL else main())
