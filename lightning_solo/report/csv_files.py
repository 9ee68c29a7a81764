"""Series from the CSV files of a run, also of a running one: Lightning's metrics, and memory.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_solo.errors import CheckpointError
from lightning_solo.report.series import Series

NO_SERIES = ("", "epoch", "step", "fit", "stage", "device")


def read_metrics(path: Path) -> dict[str, Series]:
    """Return each logged metric by name.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    return _series(read_rows(path), part=0)


def read_memory(path: Path) -> list[Series]:
    """Return each column of memory.csv, one series per fit; other stages only if there was no fit.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    rows = read_rows(path)
    by_fit: dict[str, list[Mapping[str, str]]] = {}
    for row in [row for row in rows if row.get("stage", "fit") == "fit"] or rows:
        by_fit.setdefault(row.get("fit", ""), []).append(row)
    return [series for part, fit in enumerate(by_fit.values()) for series in _series(fit, part).values()]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of a table by column, without an unfinished last line.

    Raises:
        CheckpointError: the file can't be read, or is no table with a column ``step``.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    whole = text[: text.rfind("\n") + 1]
    if not whole.strip():
        return []
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    try:
        names, rows = reader.fieldnames or (), list(reader)
    except csv.Error as error:
        raise CheckpointError(f"{path}: no CSV table ({error}); if it is damaged, move it away") from error
    if "step" not in names:
        raise CheckpointError(
            f"{path}: its columns are {', '.join(names)[:200]!r}, without 'step'; a table of Lightning's CSVLogger "
            f"or of memory_logger has one"
        )
    return [row for row in rows if None not in row and None not in row.values()]


def _series(rows: Sequence[Mapping[str, str]], part: int) -> dict[str, Series]:
    rows = [row for row in rows if math.isfinite(_number(row["step"]))]
    series = {}
    for name in rows[0] if rows else ():
        logged = [(int(float(row["step"])), _number(row[name])) for row in rows if row[name]]
        finite = [(step, value) for step, value in logged if math.isfinite(value)]
        if logged and name not in NO_SERIES:
            last = dict(finite)  # a resumed run repeats the steps since its checkpoint
            series[name] = Series(name, [*last], [*last.values()], part, left_out=len(logged) - len(finite))
    return series


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
