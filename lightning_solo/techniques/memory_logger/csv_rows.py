"""Rows of memory.csv: one per reading, with the peaks of its phases and categories."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from lightning_solo.memory.events import CATEGORIES, PHASES
from lightning_solo.memory.reading import Reading

_OF_READING = {
    field.name: field.name if field.name == "alloc_retries" else f"{field.name}_bytes" for field in fields(Reading)
}
COLUMNS = (
    *("fit", "stage", "device", "epoch", "step"),
    *_OF_READING.values(),
    *(f"{phase}_bytes" for phase in PHASES),
    *(f"{category}_bytes" for category in CATEGORIES),
)


def cells_of(reading: Reading, parts: Mapping[str, int]) -> dict[str, int | None]:
    """Return the cells of a reading and of the bytes of phases and categories, by column."""
    counters = {_OF_READING[name]: count for name, count in asdict(reading).items()}
    return counters | {f"{part}_bytes": count for part, count in parts.items()}


def append_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows of `COLUMNS` to a CSV; a new file gets a header.

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
        writer.writerows(rows)
