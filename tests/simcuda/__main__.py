"""Run a script or a module on the simulated CUDA device: ``python -m tests.simcuda [-m] <script.py or module> ...``.

Races are printed at the end of standard error. The exit status is 3 if the program succeeded but had races, and 2 if
the device isn't available.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from tests.simcuda import device
from tests.simcuda.build import UnavailableError

RACED, UNAVAILABLE = 3, 2


def main() -> int:
    """Run the script or module of the command line, and return the exit status."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments:
        print("python -m tests.simcuda [-m] <script.py or module> ...: write what to run", file=sys.stderr)
        return UNAVAILABLE
    if as_module and arguments[0] == "pytest":  # its plugin looks for races test by test
        arguments[1:1] = ["-p", "tests.simcuda.plugin"]
    try:
        device.install()
        importlib.import_module("tests.simcuda.triton_kernels").install()
    except UnavailableError as error:
        print(f"no simulated CUDA device: {error}", file=sys.stderr)
        return UNAVAILABLE
    sys.argv = arguments
    try:
        if as_module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:  # of a program that fails, too: they may be why
        races = device.races()
        for race in races:
            print(f"race: {race}", file=sys.stderr)
    return RACED if races else 0


if __name__ == "__main__":
    sys.exit(main())
