"""Plans as a table for the terminal, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table as RichTable

from lightning_solo.planner.plan import Plan
from lightning_solo.tables import WIDTH, Cell, Column, filled_table, number, size, terminal

NEEDLESS = ("peak in", "peak")
"""Columns that a narrow terminal doesn't show, the first one first."""
COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def table(plans: Sequence[Plan], chosen: Plan | None = None, width: int = WIDTH) -> RichTable:
    """Return a row per preset, with a star after the chosen one; times are per example, relative to the fastest.

    Columns that a table of ``width`` characters has no room for are left out, as far as they are needless.
    """
    times = [p.seconds_per_example for p in plans if p.fits] or [p.seconds_per_example for p in plans]
    fastest = min(times)
    columns: tuple[Column[Plan], ...] = (
        Column("preset", lambda plan: Cell(f"{plan.preset} *" if plan is chosen else plan.preset)),
        Column("verdict", lambda plan: Cell(plan.verdict, style=COLOURS[plan.verdict])),
        Column("peak", lambda plan: size(plan.peak_bytes)),
        Column("needed", lambda plan: size(plan.needed_bytes)),
        Column("host", lambda plan: size(plan.host_bytes or None)),
        Column("step", lambda plan: _times(plan.seconds_per_example, fastest)),
        Column(
            "batch", lambda plan: Cell("?") if plan.largest_micro_batch is None else number(plan.largest_micro_batch)
        ),
        Column(
            "peak in", lambda plan: Cell(max(plan.phases, key=plan.phases.__getitem__, default="").replace("_", " "))
        ),
    )
    shown = filled_table("", columns, plans)
    for heading in NEEDLESS:
        if shown.width > width:
            columns = tuple(column for column in columns if column.heading != heading)
            shown = filled_table("", columns, plans)
    return terminal(shown, [column.heading for column in columns[1:]], narrow=True)


def _times(seconds: float, fastest: float) -> Cell:
    return Cell(f"{seconds / fastest:.2f} x", seconds / fastest) if fastest else Cell()
