"""`lightning-solo export RUN|FILE`: writes the weights of a checkpoint as one plain file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.options import Parser
from lightning_solo.errors import PresetError
from lightning_solo.export.formats import DTYPES

TAKES = "write: lightning-solo export RUN|FILE [--dtype fp32|bf16] [--output FILE] [--force]"


def run(arguments: Sequence[str]) -> int:
    """Write the export and print a line about it."""
    options = parse(arguments)
    from lightning_solo.export.weights import write_weights

    print(write_weights(options.source, options.dtype, options.output, overwrite=options.force))
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option or type.
    """
    parser = Parser("export", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="RUN|FILE", help="the folder of a run, or a checkpoint")
    parser.add_argument("--dtype", default="fp32", metavar="fp32|bf16", help="the type of the weights")
    parser.add_argument("--output", type=Path, metavar="FILE", help="by default beside the checkpoint")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    options = parser.parse_args(arguments)
    if options.dtype not in DTYPES:
        raise PresetError(f"--dtype {options.dtype}: write --dtype {' or --dtype '.join(DTYPES)}")
    return options
