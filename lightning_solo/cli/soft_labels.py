"""`lightning-solo soft-labels FILE TEACHER model=... data=...`: writes draws of a teacher for the training data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.cli.command_line import composed_once
from lightning_solo.cli.options import Parser, positive
from lightning_solo.cli.train import build_parts
from lightning_solo.errors import PresetError

TAKES = (
    "write: lightning-solo soft-labels FILE TEACHER [overrides as `lightning-solo train` takes] [--batches N] [--draws"
    " 16] [--dtype bfloat16] [--streamed] [--part NAME] [--force]"
)
OF_TRAINER = ("accelerator", "devices", "enable_progress_bar")
"""Arguments of the run's Trainer that the teacher's runs take too."""


def run(arguments: Sequence[str]) -> int:
    """Write the file and print a line about it."""
    options = parse(arguments)
    draws = positive("--draws", options.draws, 16)
    batches = None if options.batches is None else positive("--batches", options.batches, 1000)
    with composed_once(options.overrides) as (cfg, checked, _):
        seed = int(cfg.seed)
    import lightning as L

    from lightning_solo.export.soft_labels import write_soft_labels

    L.seed_everything(seed, workers=True, verbose=False)
    module, data = build_parts(checked)
    trainer = {name: value for name, value in checked.trainer.items() if name in OF_TRAINER}
    line = write_soft_labels(
        module,
        data,
        options.teacher,
        options.file,
        draws=draws,
        batches=batches,
        part=options.part,
        dtype=options.dtype,
        streamed=options.streamed,
        seed=seed,
        overwrite=options.force,
        precision=checked.solo.precision or "32-true",
        **trainer,
    )
    print(line)
    print(f"train with: +solo/callback=distillation solo.callback.distillation.labels={options.file}")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options.

    Raises:
        PresetError: an unknown option, or no teacher.
    """
    parser = Parser("soft-labels", (__doc__ or "").splitlines()[0], TAKES)
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write, such as labels.soft")
    parser.add_argument("teacher", metavar="TEACHER", help="a run, a checkpoint, or a folder of Hugging Face's")
    parser.add_argument("overrides", nargs="*", help="of the run that is to be trained: model=byte_gpt_tiny")
    parser.add_argument("--batches", metavar="N", help="the first N batches in the run's order; by default all rows")
    parser.add_argument("--draws", default="16", metavar="N", help="words that are drawn for each position")
    parser.add_argument("--dtype", default="auto", help="the type of the teacher's weights, such as bfloat16")
    parser.add_argument("--streamed", action="store_true", help="keep the teacher's blocks on the host")
    parser.add_argument("--part", default="auto", metavar="NAME", help="the part that makes the logits")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    options = parser.parse_intermixed_args(list(arguments))
    if "=" in options.teacher and not Path(options.teacher).exists():
        raise PresetError(f"{options.teacher} is an override; the second argument is the teacher; {TAKES}")
    return options
