"""A ladder as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_solo.sweeps.figures import Figures
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.rungs import BASELINE
from lightning_solo.units import format_bytes


def table(rows: Sequence[Figures], steps: int) -> Table:
    """Return the table: memory, time and loss of each rung, with their changes against the baseline."""
    title = f"after {steps} optimizer steps; changes and difference are against {BASELINE}"
    made = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="")
    made.add_column("rung")
    for name in ("peak memory", "change", "step", "change", "loss", "differs", "exact"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.status == FINISHED:
            made.add_row(row.name, *cells(row))
        else:
            made.add_row(f"{row.name}: {row.status}", style="dim")
    return made


def cells(row: Figures) -> list[str]:
    """Return the figures of a row in words, an empty one where there is none.

    >>> cells(Figures("bf16", "finished", peak_bytes=3 * 2**29, peak_change=-0.25, step_s=0.5, step_change=0.1))
    ['1.50 GiB', '-25%', '500 ms', '+10%', '', '', '']
    """
    return [
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "" if row.peak_change is None else f"{row.peak_change:+.0%}",
        "" if row.step_s is None else seconds(row.step_s),
        "" if row.step_change is None else f"{row.step_change:+.0%}",
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.loss_difference is None else f"{row.loss_difference:+.1e}" if row.loss_difference else "0",
        "" if row.exact is None else "yes" if row.exact else "no",
    ]


def seconds(value: float) -> str:
    """Return a step's time with three digits.

    >>> seconds(0.00123), seconds(0.123), seconds(12.3)
    ('1.23 ms', '123 ms', '12.3 s')
    """
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def details(rows: Sequence[Figures]) -> list[str]:
    """Return a line for each row that says more of itself, or did not finish."""
    return [
        ": ".join(text for text in (row.name, row.status if row.status != FINISHED else "", row.detail) if text)
        for row in rows
        if row.detail or row.status != FINISHED
    ]


def memory_in_words(rows: Sequence[Figures]) -> str:
    """Return what the memory of the table is."""
    base = next((row for row in rows if row.device is not None), None)
    if base is None:
        return "nothing was measured"
    if base.device == "cuda":
        return "bytes allocated on the device, peak"
    before = "" if base.before_bytes is None else f", {format_bytes(base.before_bytes)} of it before training"
    return f"resident set of the process, peak{before}"
