"""The report on `ladder.json`: each rung's peak memory and step time beside the baseline's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError
from lightning_solo.report.charts import bars
from lightning_solo.report.model import Cell, Figure, Report, Table, number, plain
from lightning_solo.units import GiB, format_bytes, format_seconds

FILE = "ladder.json"
NUMBERS = ("counted_bytes", "peak_bytes", "step_s", "loss", "loss_difference")
NOISE = " ~: within the noise, the middle halves of the step times overlap the baseline's, or are not known."


def read_ladder(folder: Path) -> Report:
    """Return the report on a ladder's file; with a note if it can't be read."""
    report = Report(title=plain(folder.resolve().name))
    try:
        ladder = load(folder / FILE)
    except CheckpointError as error:
        report.notes.append(plain(error))
        return report
    if not ladder["rows"]:  # no rung has ended yet
        return report
    rows, baseline = ladder["rows"], str(ladder.get("baseline", ""))
    facts = {
        "Ladder": ladder.get("command"),
        "Ladder's hardware": ladder.get("hardware"),
        "Ladder's versions": ", ".join(f"{name} {version}" for name, version in versions_of(ladder).items()),
    }
    report.facts.update({name: plain(value) for name, value in facts.items() if value})
    counted = any(row["counted_bytes"] is not None for row in rows)  # not before 0.2.0, nor of a single step
    title, key = ("Ladder: memory of training", "counted_bytes") if counted else ("Ladder: peak memory", "peak_bytes")
    drawn = [
        bar_figure("ladder_memory", title, rows, baseline, key, "GiB", format_bytes),
        bar_figure("ladder_time", "Ladder: step time", rows, baseline, "step_s", "seconds per step", format_seconds),
    ]
    report.figures.extend(figure for figure in drawn if figure is not None)
    report.tables.append(ladder_table(rows, baseline))
    return report


def load(path: Path) -> dict[str, Any]:
    """Return the ladder, its rows checked; a number that is not finite is None.

    Raises:
        CheckpointError: the file can't be read or is no ladder.
    """
    allowed = f"a ladder is written by lightning-solo ladder, as {{'rows': [{{'name', {', '.join(NUMBERS)}}}, ...]}}"
    try:
        ladder: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: can't be read ({error}); {allowed}") from error
    rows = ladder.get("rows") if isinstance(ladder, dict) else None
    if not isinstance(rows, list):
        raise CheckpointError(f"{path}: no list of rows; {allowed}")
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise CheckpointError(f"{path}: {str(row)[:80]!r} is no row with a name; {allowed}")
        for key in NUMBERS:
            value = row.setdefault(key, None)
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
                raise CheckpointError(f"{path}: {row['name']}: {key}={value!r} is no number; {allowed}")
            if value is not None and not math.isfinite(value):
                row[key] = None
        row["name"] = plain(row["name"])
        row["step_quartiles_s"] = quartiles_of(row)
    return ladder


def quartiles_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return the first and third quartile of the step times, or None where they are not known.

    >>> quartiles_of({"step_quartiles_s": [0.1, 0.3]}), quartiles_of({"step_quartiles_s": [0.1, "?"]}), quartiles_of({})
    ((0.1, 0.3), None, None)
    """
    match row.get("step_quartiles_s"):
        case [int() | float() as first, int() | float() as third] if math.isfinite(first) and math.isfinite(third):
            return first, third
    return None


def versions_of(ladder: dict[str, Any]) -> dict[str, Any]:
    """Return the versions, none where there is no mapping."""
    versions = ladder.get("versions")
    return versions if isinstance(versions, dict) else {}


def change(rows: list[dict[str, Any]], baseline: str, row: dict[str, Any], key: str) -> float | None:
    """Return by how much a figure differs from the baseline's, as a share of it."""
    before = next((other[key] for other in rows if other["name"] == baseline), None)
    return None if not before or row[key] is None else row[key] / before - 1.0


def noise(row: dict[str, Any], key: str) -> str:
    """Return the mark of a change that is within the spread of the steps."""
    return "~ " if key == "step_s" and row.get("step_within_noise") is True else ""


def bar_figure(
    name: str,
    title: str,
    rows: list[dict[str, Any]],
    baseline: str,
    key: str,
    unit: str,
    shown: Callable[[Any], str],
) -> Figure | None:
    """Return bars of one figure, or None where no row has it."""
    if all(row[key] is None for row in rows):
        return None
    scale = GiB if unit == "GiB" else 1
    drawn, cells = [], []
    for row, distinct in zip(rows, distinct_names([row["name"] for row in rows]), strict=True):
        differs = change(rows, baseline, row, key)
        share = "" if differs is None or row["name"] == baseline else f" ({noise(row, key)}{differs:+.0%})"
        text = plain(row.get("status") or "no figure") if row[key] is None else f"{shown(row[key])}{share}"
        value = None if row[key] is None else row[key] / scale
        drawn.append({"name": distinct, "value": value, "label": text, "first": row["name"] == baseline})
        cells.append((Cell(distinct, distinct), Cell(text, value)))
    values = "; ".join(f"{row['name']}: {row['label']}" for row in drawn)
    return Figure(
        name=name,
        title=title,
        caption=f"The dashed line is {plain(baseline) or 'absent: no baseline is named'}."
        + (NOISE if any(noise(row, key) for row in rows) else ""),
        alternative=f"Bar chart: {title}. {values}.",
        draw=partial(bars, drawn, unit),
        table=Table(f"{title}: data", ("combination", unit), cells, sortable=True),
    )


def distinct_names(names: list[str]) -> list[str]:
    """Return names, each with a number where it occurs again.

    >>> distinct_names(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    counted = dict.fromkeys(names, 0)
    distinct = []
    for name in names:
        counted[name] += 1
        distinct.append(name if counted[name] == 1 else f"{name} ({counted[name]})")
    return distinct


def ladder_table(rows: list[dict[str, Any]], baseline: str) -> Table:
    """Return every row with its changes against the baseline."""
    headings = ("combination", "status", "training", "change", "peak memory", "change", "step time", "spread",
                "change", "loss", "loss − baseline's", "exact", "detail")  # fmt: skip
    cells = []
    for row in rows:
        changes = [change(rows, baseline, row, key) for key in ("counted_bytes", "peak_bytes", "step_s")]
        counted, peak, step = row["counted_bytes"], row["peak_bytes"], row["step_s"]
        cells.append((
            Cell(row["name"], row["name"]),
            Cell(plain(row.get("status") or "–"), plain(row.get("status") or "")),
            Cell("–") if counted is None else Cell(format_bytes(int(counted)), counted), percent(changes[0]),
            Cell("–") if peak is None else Cell(format_bytes(int(peak)), peak), percent(changes[1]),
            Cell("–") if step is None else Cell(format_seconds(step), step), spread(row),
            percent(changes[2], noise(row, "step_s")),
            number(row["loss"]), number(row["loss_difference"]),
            Cell({"True": "yes", "False": "no"}.get(str(row.get("exact")), "–")),
            Cell(plain(row.get("detail") or "")),
        ))  # fmt: skip
    return Table("Ladder", headings, cells, sortable=True)


def spread(row: dict[str, Any]) -> Cell:
    """Return half the interquartile range of the step times, as a share of their median."""
    if not row["step_s"] or row["step_quartiles_s"] is None:
        return Cell("–")
    first, third = row["step_quartiles_s"]
    share = (third - first) / 2 / row["step_s"]
    return Cell(f"±{share:.1%}", share)


def percent(share: float | None, mark: str = "") -> Cell:
    """Return a change as a cell."""
    return Cell("–") if share is None else Cell(f"{mark}{share:+.1%}", share)
