"""`lightning-solo report RUN`: draws a run, a sweep or a ladder as an HTML page, PNG files and for TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_solo.errors import PresetError

USAGE = "write: lightning-solo report RUN, with the folder of a run, a sweep or a ladder, such as runs/first"


def run(arguments: Sequence[str]) -> int:
    """Write the report into the folder and print its files."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"{__doc__}\n{USAGE}")
        return 0
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        raise PresetError(f"report takes one folder, got {' '.join(arguments)!r}; {USAGE}")
    from lightning_solo.report import write_report

    written = write_report(Path(arguments[0]))
    for note in written.notes:
        print(f"left out: {note}", file=sys.stderr)
    print(f"report: {written.page}")
    for path in written.pngs:
        print(f"picture: {path}")
    if written.tensorboard is not None:
        print(f"TensorBoard: {written.tensorboard}")
    return 0
