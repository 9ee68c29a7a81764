"""Series from the CSV files of a run, also of a running one: Lightning's metrics, and memory.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_solo.errors import CheckpointError
from lightning_solo.report.series import Series

NO_SERIES = ("", "epoch", "step", "fit", "stage", "device")


@dataclass(frozen=True)
class Rows:
    """The complete rows of a table: as many cells as columns."""

    names: Sequence[str]
    cells: Sequence[Sequence[str]]

    def text(self, row: Sequence[str], name: str, otherwise: str) -> str:
        """Return a cell, or ``otherwise`` where there is no such column."""
        return row[self.names.index(name)] if name in self.names else otherwise


def read_metrics(path: Path) -> dict[str, Series]:
    """Return each logged metric by name.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    rows = read_rows(path)
    return _series(rows, rows.cells, part=0)


def read_memory(path: Path) -> list[Series]:
    """Return each column of memory.csv, one series per fit; other stages only if there was no fit.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    rows = read_rows(path)
    fitted = [row for row in rows.cells if rows.text(row, "stage", "fit") == "fit"]
    by_fit: dict[str, list[Sequence[str]]] = {}
    for row in fitted or rows.cells:
        by_fit.setdefault(rows.text(row, "fit", ""), []).append(row)
    parts = (_series(rows, part, number) for number, part in enumerate(by_fit.values()))
    return [series for part in parts for series in part.values()]


def read_rows(path: Path) -> Rows:
    """Return the rows, without an unfinished last line.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    whole = text[: text.rfind("\n") + 1]
    try:
        names, *cells = csv.reader(io.StringIO(whole, newline="")) if whole.strip() else [["step"]]
    except csv.Error as error:
        raise CheckpointError(f"{path}: no CSV table ({error}); if it is damaged, move it away") from error
    if "step" not in names:
        raise CheckpointError(
            f"{path}: its columns are {', '.join(names)[:200]!r}, without 'step'; a table of Lightning's CSVLogger "
            f"or of memory_logger has one"
        )
    return Rows(names, [row for row in cells if len(row) == len(names)])


def _series(rows: Rows, cells: Sequence[Sequence[str]], part: int) -> dict[str, Series]:
    at = rows.names.index("step")
    steps = [_number(row[at]) for row in cells]
    series = {}
    for column, name in enumerate(rows.names):
        if name in NO_SERIES:
            continue
        logged = [
            (int(step), _number(row[column]))
            for step, row in zip(steps, cells, strict=True)
            if row[column] and math.isfinite(step)
        ]
        finite = [(step, value) for step, value in logged if math.isfinite(value)]
        if logged:
            left_out = len(logged) - len(finite)
            series[name] = Series(name, [step for step, _ in finite], [v for _, v in finite], part, left_out)
    return series


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
