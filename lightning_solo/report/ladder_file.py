"""The report on `ladder.json`: peak memory and step time of each rung, compared with the baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_solo.errors import CheckpointError
from lightning_solo.ladder.display import ALL, shortened
from lightning_solo.ladder.figures import CHANGES, Figures, changes
from lightning_solo.memory.events import CATEGORIES
from lightning_solo.report.charts import bars, stacks
from lightning_solo.report.model import Figure, Report, plain
from lightning_solo.report.plan_chart import CATEGORIES as SIGNS
from lightning_solo.tables import Cell, Table, filled_table
from lightning_solo.units import GiB, MiB, format_bytes, format_seconds

FILE = "ladder.json"
NUMBERS = ("counted_bytes", "peak_bytes", "step_s", "loss", "loss_difference")
NOISE = " ~: within the noise; the middle halves of the step times overlap the baseline's, or are unknown."


def read_ladder(folder: Path) -> Report:
    """Return the report on a ladder's file, or one with a note if the file can't be read."""
    report = Report(title=plain(folder.resolve().name))
    try:
        ladder = load(folder / FILE)
    except CheckpointError as error:
        report.notes.append(plain(error))
        return report
    if not ladder["rows"]:  # no rung has ended yet
        return report
    baseline = str(ladder.get("baseline", ""))
    rows = figures_of(ladder["rows"], baseline)
    versions = ladder["versions"] if isinstance(ladder.get("versions"), dict) else {}
    facts = {
        "Ladder": ladder.get("command"),
        "Ladder's hardware": ladder.get("hardware"),
        "Ladder's versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    report.facts.update({name: plain(value) for name, value in facts.items() if value})
    report.figures.extend(figures(rows, baseline))
    report.tables.append(filled_table("Ladder", ALL, shortened(rows), sortable=True))
    return report


def figures(rows: list[Figures], baseline: str) -> list[Figure]:
    """Return the charts of memory and step time, each if a row has the figure."""
    counted = any(row.counted_bytes is not None for row in rows)  # not before 0.2.0, nor of a single step
    title, key = ("Ladder: memory of training", "counted_bytes") if counted else ("Ladder: peak memory", "peak_bytes")
    unit = "GiB" if any((getattr(row, key) or 0) >= GiB for row in rows) else "MiB"
    drawn = [
        bar_figure("ladder_memory", title, rows, baseline, key, unit, format_bytes),
        bar_figure("ladder_time", "Ladder: step time", rows, baseline, "step_s", "seconds per step", format_seconds),
    ]
    return [figure for figure in drawn if figure is not None]


def load(path: Path) -> dict[str, Any]:
    """Return the ladder with checked rows; a number that is not finite becomes None.

    Raises:
        CheckpointError: the file can't be read, or is no ladder.
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
    return ladder


def figures_of(rows: list[dict[str, Any]], baseline: str) -> list[Figures]:
    """Return checked rows as figures, with their changes against the baseline if it is one of them."""
    base = next((row for row in rows if row["name"] == baseline), {})
    return [
        Figures(
            name=plain(row["name"]),
            status=plain(row.get("status") or ""),
            detail=plain(row.get("detail") or ""),
            step_quartiles_s=quartiles_of(row),
            step_within_noise=row.get("step_within_noise") is True,
            exact=row["exact"] if isinstance(row.get("exact"), bool) else None,
            breakdown=breakdown_of(row),
            **{key: row[key] for key in NUMBERS},
            **changes(row, base),
        )
        for row in rows
    ]


def breakdown_of(row: dict[str, Any]) -> dict[str, int] | None:
    """Return the bytes of each category, or None if they are unknown.

    >>> breakdown_of({"breakdown": {"weights": 8}}), breakdown_of({"breakdown": [8]})
    (None, None)
    """
    sizes = row.get("breakdown")
    known = isinstance(sizes, dict) and all(type(sizes.get(name)) is int for name in CATEGORIES)
    return {name: sizes[name] for name in CATEGORIES} if known and isinstance(sizes, dict) else None


def quartiles_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return the first and third quartile of the step times, or None if they are unknown.

    >>> quartiles_of({"step_quartiles_s": [0.1, 0.3]}), quartiles_of({"step_quartiles_s": [0.1, "?"]}), quartiles_of({})
    ((0.1, 0.3), None, None)
    """
    match row.get("step_quartiles_s"):
        case [int() | float() as first, int() | float() as third] if math.isfinite(first) and math.isfinite(third):
            return first, third
    return None


def bar_figure(
    name: str,
    title: str,
    rows: list[Figures],
    baseline: str,
    key: str,
    unit: str,
    shown: Callable[[Any], str],
) -> Figure | None:
    """Return bars of one figure, or None if no row has it; bars of counted bytes are stacked by category."""
    if all(getattr(row, key) is None for row in rows):
        return None
    scale = {"GiB": GiB, "MiB": MiB}.get(unit, 1)
    drawn: list[dict[str, Any]] = []
    noisy = key == "step_s" and any(row.step_within_noise for row in rows)
    stacked = key == "counted_bytes" and all(row.breakdown for row in rows if row.counted_bytes is not None)
    names = distinct_names([row.name for row in shortened(rows)])
    for row, distinct in zip(rows, names, strict=True):
        figure, differs = getattr(row, key), getattr(row, CHANGES[key])
        mark = "~ " if key == "step_s" and row.step_within_noise else ""
        share = "" if differs is None or row.name == baseline else f" ({mark}{differs:+.0%})"
        text = row.status or "no figure" if figure is None else f"{shown(figure)}{share}"
        value = None if figure is None else figure / scale
        drawn.append({"name": distinct, "value": value, "label": text, "first": row.name == baseline})
        if stacked:
            sizes = row.breakdown or {}
            drawn[-1]["parts"] = {name: sizes.get(name.replace(" ", "_"), 0) / scale for name in SIGNS}
    before = f"The dashed line is {plain(baseline) or 'absent: no baseline is named'}."
    cells = [(Cell(row["name"], row["name"]), Cell(row["label"], row["value"])) for row in drawn]
    values = "; ".join(f"{row['name']}: {row['label']}" for row in drawn)
    return Figure(
        name=name,
        title=title,
        caption="The tensors at the peak of an optimizer step." if stacked else before + (NOISE if noisy else ""),
        alternative=f"Bar chart: {title}. {values}.",
        draw=partial(stacks, drawn, SIGNS, unit, None) if stacked else partial(bars, drawn, unit),
        table=Table(f"{title}: data", ("combination", unit), cells, sortable=True),
    )


def distinct_names(names: list[str]) -> list[str]:
    """Return names, with a number after a name that occurs again.

    >>> distinct_names(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    counts = [names[: n + 1].count(name) for n, name in enumerate(names)]
    return [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]
