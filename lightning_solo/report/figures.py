"""Figures of series: chart, caption, alternative text and table of data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from lightning_solo.report.charts import areas, lines
from lightning_solo.report.model import Draw, Figure, plain
from lightning_solo.report.series import Series, thin, thin_together
from lightning_solo.tables import Cell, Table, number

ROWS = 60
"""Points per series in the table below a chart, about."""
MOST_ROWS = 600


def line_figure(name: str, title: str, unit: str, series: Sequence[Series], caption: str) -> Figure | None:
    """Return a chart of series over steps, or None if all are empty."""
    series = [one for one in series if one.values]
    if not series:
        return None
    drawn = thin(series)
    left_out = sum(one.left_out for one in series)
    note = f" {left_out:,} values are not finite (nan or inf) and are not drawn." if left_out else ""
    words = f"{caption}{_thinned(series, drawn)}{note}"
    return _figure(name, title, unit, series, words, partial(lines, drawn, "optimizer step", unit))


def stacked_figure(name: str, title: str, unit: str, series: Sequence[Series], caption: str) -> Figure | None:
    """Return a chart of stacked series, or None if they share no step."""
    drawn = thin_together([one for one in series if one.values])
    if not drawn or not drawn[0].values:
        return None
    words = f"{caption} From the bottom: {', '.join(one.name for one in drawn)}.{_thinned(series, drawn)}"
    return _figure(name, title, unit, series, words, partial(areas, drawn, "optimizer step", unit))


def _figure(name: str, title: str, unit: str, series: Sequence[Series], caption: str, draw: Draw) -> Figure:
    return Figure(name, title, caption, in_words(title, unit, series), draw, points_table(title, unit, series))


def in_words(title: str, unit: str, series: Sequence[Series]) -> str:
    """Return the alternative text: the first and last, least and greatest value of each series."""
    ranges = [
        f"{one.name} from {number(one.values[0]).text} at step {one.steps[0]} to {number(one.values[-1]).text} at step "
        f"{one.steps[-1]}, least {number(min(one.values)).text}, greatest {number(max(one.values)).text}"
        for one in series[:8]
        if one.values
    ]
    more = f"; and {len(series) - 8} more" if len(series) > 8 else ""
    return plain(f"Line chart: {title}, in {unit}, over optimizer steps. {'; '.join(ranges)}{more}.")


def points_table(title: str, unit: str, series: Sequence[Series]) -> Table:
    """Return the points as a table, thinned further than the chart but with the peaks."""
    each = max(2, min(ROWS, MOST_ROWS // max(1, len(series))) // 2)
    rows = [
        (Cell(plain(one.name)), number(step), number(value, 6))
        for one in (series_.thinned(each) for series_ in series)
        for step, value in zip(one.steps, one.values, strict=True)
    ]
    return Table(f"{title}: data", ("series", "optimizer step", unit), rows)


def summary(caption: str, series: Iterable[Series]) -> Table:
    """Return one row per series: its number of points, first, last, least and greatest value."""
    rows = []
    for one in series:
        values = one.values
        ends = (values[0], values[-1], min(values), max(values)) if values else (None,) * 4
        rows.append((Cell(plain(one.name), one.name), number(len(values)), *map(number, ends), number(one.left_out)))
    return Table(caption, ("name", "points", "first", "last", "least", "greatest", "not finite"), rows, sortable=True)


def _thinned(series: Sequence[Series], drawn: Sequence[Series]) -> str:
    before, after = sum(len(one.values) for one in series), sum(len(one.values) for one in drawn)
    if after == before:
        return ""
    return f" Thinned from {before:,} points to {after:,}: the least and the greatest of each stretch are kept."
