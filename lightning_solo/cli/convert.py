"""`lightning-solo convert FILE --to plain|compact`: makes a checkpoint that resumes without compact states, or with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.options import Parser
from lightning_solo.errors import PresetError, nearest
from lightning_solo.export.formats import FORMS

TAKES = "write: lightning-solo convert FILE --to plain|compact [--output FILE] [--force]"


def run(arguments: Sequence[str]) -> int:
    """Write the converted checkpoint and print lines about it."""
    options = parse(arguments)
    from lightning_solo.export.conversion import convert_checkpoint

    for line in convert_checkpoint(options.source, options.to, options.output, overwrite=options.force):
        print(line)
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option, or one is missing.
    """
    parser = Parser("convert", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="FILE", help="a checkpoint, or the folder of a run")
    parser.add_argument("--to", required=True, metavar="plain|compact", help="the form of weights and states")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default NAME-plain.ckpt beside the file")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    options = parser.parse_args(arguments)
    if options.to not in FORMS:
        raise PresetError(f"--to {options.to}{nearest(options.to, FORMS)}there are {', '.join(FORMS)}")
    return options
