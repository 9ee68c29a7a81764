"""Plans as a table for the terminal, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lightning_solo.planner.plan import Plan
from lightning_solo.units import format_bytes

COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}
HEADINGS = ("verdict", "peak", "needed", "host", "step", "batch", "peak in")


def table(plans: Sequence[Plan], chosen: Plan | None = None) -> Table:
    """Return a row per preset, with a star after the chosen one; times are per example, relative to the fastest."""
    times = [p.seconds_per_example for p in plans if p.fits] or [p.seconds_per_example for p in plans]
    fastest = min(times)
    # collapsed, with cells of two lines, it fits into eighty columns
    rows = Table(box=None, pad_edge=False, collapse_padding=True)
    rows.add_column("preset", no_wrap=True)
    for name in HEADINGS:
        rows.add_column(name, justify="left" if name in ("verdict", "peak in") else "right", overflow="fold")
    for plan in plans:
        rows.add_row(
            Text(f"{plan.preset} *" if plan is chosen else plan.preset),  # a list of presets is in brackets, as markup
            Text(plan.verdict, style=COLOURS[plan.verdict]),
            format_bytes(plan.peak_bytes),
            format_bytes(plan.needed_bytes),
            format_bytes(plan.host_bytes) if plan.host_bytes else "",
            f"{plan.seconds_per_example / fastest:.2f} x" if fastest else "",
            "?" if plan.largest_micro_batch is None else str(plan.largest_micro_batch),
            max(plan.phases, key=lambda phase: plan.phases[phase], default="").replace("_", " "),
        )
    return rows
