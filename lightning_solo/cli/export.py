"""`lightning-solo export RUN|FILE --format weights`: writes the content of a checkpoint in a form that others read."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.options import Parser
from lightning_solo.errors import PresetError, nearest
from lightning_solo.export.formats import DTYPES, FORMATS

TAKES = "write: lightning-solo export RUN|FILE [--format weights] [--dtype fp32|bf16] [--output FILE] [--force]"


def run(arguments: Sequence[str]) -> int:
    """Write the export and print a line about it."""
    options = parse(arguments)
    write = pkgutil.resolve_name(FORMATS[options.format])
    print(write(options.source, options.dtype, options.output, overwrite=options.force))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option, format or type.
    """
    parser = Parser("export", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="RUN|FILE", help="the folder of a run, or a checkpoint")
    parser.add_argument("--format", default="weights", help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("--dtype", default="fp32", metavar="fp32|bf16", help="the type of the weights")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default beside the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    options = parser.parse_args(arguments)
    if options.format not in FORMATS:
        raise PresetError(f"--format {options.format}{nearest(options.format, FORMATS)}there are {', '.join(FORMATS)}")
    if options.dtype not in DTYPES:
        raise PresetError(f"--dtype {options.dtype}: write --dtype {' or --dtype '.join(DTYPES)}")
    return options
