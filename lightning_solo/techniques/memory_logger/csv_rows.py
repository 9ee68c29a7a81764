"""Rows of memory.csv: one per reading, with the peaks of its phases and categories."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from lightning_solo.memory.events import CATEGORIES, PHASES
from lightning_solo.memory.reading import Reading


def column(name: str) -> str:
    """Return the column of a counter, a phase or a category."""
    return name if name == "alloc_retries" else f"{name}_bytes"


COUNTS = (*(field.name for field in fields(Reading)), *PHASES, *CATEGORIES)
COLUMNS = ("fit", "stage", "device", "epoch", "step", *map(column, COUNTS))


def append_row(path: Path, row: Mapping[str, object]) -> None:
    """Append a row of `COLUMNS` to a CSV; a new file gets a header.

    Raises:
        OSError: the file can't be written, or has another header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        header = file.readline()
        if header and header.strip() != ",".join(COLUMNS):
            raise OSError("it holds a table with other columns")
        writer = csv.DictWriter(file, COLUMNS)
        if not header:
            writer.writeheader()
        writer.writerow(row)
