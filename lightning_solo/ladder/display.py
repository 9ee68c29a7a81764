"""A ladder as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from lightning_solo.ladder.figures import Figures
from lightning_solo.ladder.rungs import BASELINE
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.units import GiB, MiB, format_bytes, format_seconds

HEADINGS = ("training", "change", "peak", "step", "change", "loss", "differs", "exact")


def table(rows: Sequence[Figures], steps: int) -> Table:
    """Return the table: memory, time and loss of each rung, with their changes against the baseline."""
    title = f"after {steps} optimizer steps; changes and difference are against {BASELINE}"
    # collapsed and folded, it fits eighty columns
    rungs = Table(box=None, pad_edge=False, collapse_padding=True, title=title, title_justify="left", title_style="")
    rungs.add_column("rung", overflow="fold")
    for name in HEADINGS:
        rungs.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if row.status == FINISHED:
            rungs.add_row(row.name, *cells(row))
        else:
            rungs.add_row(f"{row.name}: {row.status}", style="dim")
    return rungs


def cells(row: Figures) -> list[str]:
    """Return the figures of a row as text, empty where there is none.

    >>> cells(Figures("bf16", "finished", counted_bytes=2**30, counted_change=-0.25, peak_bytes=3 * 2**29, loss=2.5))
    ['1024 MiB', '-25%', '1536 MiB', '', '', '2.5', '', '']
    >>> cells(Figures("a", "", step_s=0.5, step_quartiles_s=(0.48, 0.54), step_change=0.04, step_within_noise=True))
    ['', '', '', '500 ms ±6%', '~ +4%', '', '', '']
    """
    noise, spread = "~ " if row.step_within_noise else "", ""
    if row.step_s is not None and row.step_quartiles_s is not None:
        first, third = row.step_quartiles_s
        spread = f" ±{(third - first) / 2 / row.step_s:.0%}"
    return [
        size(row.counted_bytes),
        "" if row.counted_change is None else f"{row.counted_change:+.0%}",
        size(row.peak_bytes),
        "" if row.step_s is None else f"{format_seconds(row.step_s)}{spread}",
        "" if row.step_change is None else f"{noise}{row.step_change:+.0%}",
        "" if row.loss is None else f"{row.loss:.4g}",
        "" if row.loss_difference is None else f"{row.loss_difference:+.1e}" if row.loss_difference else "0",
        "" if row.exact is None else "yes" if row.exact else "no",
    ]


def size(count: int | None) -> str:
    """Return bytes with three digits or so, which leave room for the other columns; empty for None.

    >>> size(3 * 2**19), size(399 * 2**20), size(2**34), size(None)
    ('1.5 MiB', '399 MiB', '16.0 GiB', '')
    """
    if count is None:
        return ""
    value, unit = (count / GiB, "GiB") if count >= 10 * GiB else (count / MiB, "MiB")
    return f"{value:.{0 if value >= 100 else 1}f} {unit}"


def noise_in_words(rows: Sequence[Figures]) -> str:
    """Return a legend of the spread of step times and of the mark at a change of them, if the table has them."""
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
    """Return a line that says which memory the table shows."""
    base = next((row for row in rows if row.device is not None), None)
    if base is None:
        return "nothing was measured"
    training = "training: the most bytes that tensors took in an optimizer step, counted; peak: "
    if base.device == "cuda":
        return f"{training}bytes allocated on the device"
    before = "" if base.before_bytes is None else f", {format_bytes(base.before_bytes)} of it before training"
    return f"{training}resident set of the process{before}"
