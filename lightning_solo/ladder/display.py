"""A ladder as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table as RichTable

from lightning_solo.ladder.figures import Figures
from lightning_solo.ladder.rungs import BASELINE
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.tables import Cell, Column, filled_table, number, percent, terminal
from lightning_solo.units import GiB, MiB, format_bytes, format_seconds


def table(rows: Sequence[Figures], steps: int) -> RichTable:
    """Return the table: memory, time and loss of each rung, with their changes against the baseline."""
    title = f"after {steps} optimizer steps; changes and difference are against {BASELINE}"
    return terminal(filled_table(title, (RUNG, *COLUMNS), shortened(rows)), wrapped=(RUNG.heading,), narrow=True)


def shortened(rows: Sequence[Figures]) -> list[Figures]:
    """Return rows in which a rung that adds one technique to the row above has only this technique in its name.

    >>> [row.name for row in shortened([Figures(name, "") for name in ("a", "b", "a + b", "a + b + c", "a + c")])]
    ['a', 'b', 'a + b', '+ c', 'a + c']
    """
    before = ["", *(row.name for row in rows)]
    short = []
    for row, above in zip(rows, before, strict=False):
        added = row.name.removeprefix(f"{above} + ")
        adds = " + " in above and added != row.name and " + " not in added
        short.append(replace(row, name=f"+ {added}") if adds else row)
    return short


def size(count: int | None) -> Cell:
    """Return bytes with about three digits, to leave room for the other columns.

    >>> [size(count).text for count in (3 * 2**19, 399 * 2**20, 2**34, None)]
    ['1.5 MiB', '399 MiB', '16.0 GiB', '']
    """
    if count is None:
        return Cell()
    value, unit = (count / GiB, "GiB") if count >= 10 * GiB else (count / MiB, "MiB")
    return Cell(f"{value:.{0 if value >= 100 else 1}f} {unit}", count)


def step_time(row: Figures) -> Cell:
    """Return the median step time, and half the interquartile range as a share of it.

    >>> step_time(Figures("a", "finished", step_s=0.5, step_quartiles_s=(0.48, 0.54))).text
    '500 ms ±6%'
    """
    if row.step_s is None:
        return Cell()
    spread = ""
    if row.step_s and row.step_quartiles_s is not None:
        first, third = row.step_quartiles_s
        spread = f" ±{(third - first) / 2 / row.step_s:.0%}"
    return Cell(f"{format_seconds(row.step_s)}{spread}", row.step_s)


def _rung(row: Figures) -> Cell:
    finished = row.status == FINISHED
    return Cell(row.name if finished else f"{row.name}: {row.status}", row.name, "" if finished else "dim")


def _difference(row: Figures) -> Cell:
    value = row.loss_difference
    return Cell() if value is None else Cell(f"{value:+.1e}" if value else "0", value)


RUNG = Column("rung", _rung)
COLUMNS = (
    Column[Figures]("training", lambda row: size(row.counted_bytes)),
    Column[Figures]("change", lambda row: percent(row.counted_change)),
    Column[Figures]("peak", lambda row: size(row.peak_bytes)),
    Column[Figures]("step", step_time),
    Column[Figures]("change", lambda row: percent(row.step_change, "~ " if row.step_within_noise else "")),
    Column[Figures]("loss", lambda row: number(row.loss, 4)),
    Column[Figures]("differs", _difference),
    Column[Figures]("exact", lambda row: Cell() if row.exact is None else Cell("yes" if row.exact else "no")),
)
ALL = (
    Column[Figures]("rung", lambda row: Cell(row.name, row.name)),
    Column[Figures]("status", lambda row: Cell(row.status, row.status)),
    *COLUMNS[:3],
    Column[Figures]("change", lambda row: percent(row.peak_change)),
    *COLUMNS[3:],
    Column[Figures]("detail", lambda row: Cell(row.detail)),
)
"""Columns of the report's table, which has room for the change of the peak and for the details."""


def noise_in_words(rows: Sequence[Figures]) -> str:
    """Return a legend of those of the step times' marks, ± and ~, that the table contains."""
    timed = [row for row in rows if row.step_s is not None]
    if not timed:
        return ""
    legend = "±: half the interquartile range of the step times"
    if any(row.step_within_noise for row in timed):
        legend += "; ~: within the noise, the middle halves of the step times overlap the baseline's"
        legend += ", or too few steps were timed to say" if any(row.step_quartiles_s is None for row in timed) else ""
    return legend


def details(rows: Sequence[Figures]) -> list[str]:
    """Return a line for each row that has details or did not finish."""
    return [
        ": ".join(text for text in (row.name, row.status if row.status != FINISHED else "", row.detail) if text)
        for row in rows
        if row.detail or row.status != FINISHED
    ]


def memory_in_words(rows: Sequence[Figures]) -> str:
    """Return a line about the kind of memory in the table."""
    base = next((row for row in rows if row.device is not None), None)
    if base is None:
        return "nothing was measured"
    training = "training: the most bytes that tensors took in an optimizer step, counted; peak: "
    if base.device == "cuda":
        return f"{training}bytes allocated on the device"
    before = "" if base.before_bytes is None else f", {format_bytes(base.before_bytes)} of it before training"
    return f"{training}resident set of the process{before}"
