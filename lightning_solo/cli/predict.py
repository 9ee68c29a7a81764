"""`lightning-solo predict RUN`: streams the predictions of a run's module into a folder, in batches that fit."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli import INTERRUPTED
from lightning_solo.cli.options import Parser, positive
from lightning_solo.cli.trained_run import CHANGEABLE, open_run, rebuilt
from lightning_solo.units import format_bytes

TAKES = (
    "write: lightning-solo predict RUN [--out FOLDER] [--split predict|test|validation] [--checkpoint last|best|FILE]"
    " [--format jsonl|safetensors] [--batch-size N] [--allow PREFIX] [--force] [data.name=value ...]"
)


def run(arguments: Sequence[str]) -> int:
    """Write the predictions, and print lines about them."""
    options = parse(arguments)
    size = None if options.batch_size is None else positive("--batch-size", options.batch_size, 64)
    trained = open_run(options.source, options.checkpoint, options.overrides, options.allow)
    output = options.out or options.source / "predictions"
    from lightning_solo.prediction.streaming import MANIFEST, refuse_others, write_predictions

    refuse_others(output, overwrite=options.force)
    with tempfile.TemporaryDirectory() as scratch:
        trainer, module, data = rebuilt(trained, Path(scratch))
        try:
            manifest = write_predictions(
                trainer,
                module,
                data,
                output,
                split=options.split,
                format=options.format,
                batch_size=size,
                ckpt_path=trained.checkpoint,
                overwrite=options.force,
            )
        except SystemExit as exit_:
            if isinstance(exit_.__context__, KeyboardInterrupt):  # for which Lightning's status is 1
                print(f"interrupted; nothing is left in {output}", file=sys.stderr)
                raise SystemExit(INTERRUPTED) from None
            raise
    bytes_ = format_bytes(sum(file.stat().st_size for file in output.iterdir()))
    print(f"{manifest['rows']} rows of {trained.checkpoint}: {output}, {bytes_}; {MANIFEST} lists the files")
    if manifest["batch_size"] is not None:
        print(f"data: {manifest['split']}, in batches of {manifest['batch_size']} rows")
    if manifest["split_into"] is not None:
        print(f"batches that didn't fit into memory were split into parts of {manifest['split_into']} rows")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option.
    """
    parser = Parser("predict", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("source", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"of {', '.join(CHANGEABLE)}, as in train")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; by default predictions in the run's")
    parser.add_argument("--split", help="whose loader is used: predict, test or validation; by default the first there")
    parser.add_argument("--checkpoint", default="last", help="last, best, or a file; by default last")
    parser.add_argument("--format", help="jsonl or safetensors; by default safetensors for tensors")
    parser.add_argument("--batch-size", metavar="N", help="rows; by default the loader's, or the largest that fits")
    parser.add_argument(
        "--allow", type=lambda text: text.split(","), default=[], metavar="PREFIX", help="code to trust"
    )
    parser.add_argument("--force", action="store_true", help="replace earlier predictions")
    return parser.parse_intermixed_args(arguments)
