"""`lightning-solo results RUN`: the rows of a sweep as a table, sorted, as CSV, and the front of loss against cost."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_solo.errors import NothingToDoError, PresetError, nearest
from lightning_solo.sweeps.display import duration
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row, pareto_front, read
from lightning_solo.units import format_bytes

COLUMNS: dict[str, Callable[[Row], Any]] = {
    "job": lambda row: row.number,
    "overrides": lambda row: " ".join(row.overrides),
    "status": lambda row: row.status,
    "loss": lambda row: row.loss,
    "peak_device_bytes": lambda row: row.peak_device_bytes,
    "peak_host_bytes": lambda row: row.peak_host_bytes,
    "tokens_per_s": lambda row: row.tokens_per_s,
    "seconds": lambda row: row.seconds,
    "steps": lambda row: row.steps,
    "attempt": lambda row: row.attempt,
    "detail": lambda row: row.detail,
}
"""Name, as for `--sort` and in a CSV's head -> its value."""
WORDS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"{value:.4g}",
    "peak_device_bytes": format_bytes,
    "peak_host_bytes": format_bytes,
    "tokens_per_s": lambda value: f"{value:,.0f}",
    "seconds": duration,
}
SHOWN = ("job", "overrides", "status", "loss", "peak_device_bytes", "peak_host_bytes", "tokens_per_s", "seconds")


def run(arguments: Sequence[str]) -> int:
    """Print the rows of a sweep, or write them as CSV; exit 1 where a job did not finish."""
    asked = _parser().parse_args(arguments)
    rows = rows_of(asked.run)
    if asked.sort not in COLUMNS:
        raise PresetError(
            f"--sort {asked.sort}: no such column{nearest(asked.sort, COLUMNS)}one of {', '.join(COLUMNS)}"
        )
    rows = sorted(rows, key=lambda row: _order(COLUMNS[asked.sort](row)), reverse=asked.descending)
    if asked.csv is not None:
        write_csv(rows, asked.csv)
    else:
        print_rows(rows)
    return int(any(row.status != FINISHED for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-solo results", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the sweep's folder, such as runs/first")
    parser.add_argument("--sort", default="job", metavar="COLUMN", help=f"one of {', '.join(COLUMNS)}")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument("--csv", metavar="FILE", help="write them there, - for standard output, with all metrics")
    return parser


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of a sweep's folder.

    Raises:
        NothingToDoError: there are none; lists the sweeps that are beside it.
        CheckpointError: they are of another version.
    """
    rows = read(folder / "results.jsonl")
    if not rows:
        beside = folder if folder.is_dir() else folder.parent
        there = sorted(str(path.parent) for path in beside.glob("*/results.jsonl"))
        raise NothingToDoError(
            f"{folder}: no results of a sweep there; "
            + (f"there are {', '.join(there)}" if there else "lightning-solo train -m ... run=<name> makes runs/<name>")
        )
    return rows


def _order(value: Any) -> tuple[bool, Any]:
    return value is None or value != value, value  # what isn't known comes last


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table; a star marks the jobs that no other beats in loss and memory, or in loss and time."""
    memory = "peak_device_bytes" if any(row.peak_device_bytes for row in rows) else "peak_host_bytes"
    fronts = {
        "memory": {row.number for row in pareto_front(rows, ["loss", memory])},
        "time": {row.number for row in pareto_front(rows, ["loss", "seconds"])},
    }
    shown = [name for name in SHOWN if any(COLUMNS[name](row) is not None for row in rows)]
    common = {text for text in rows[0].overrides if len(rows) > 1 and all(text in row.overrides for row in rows)}
    table = Table(box=None, pad_edge=False, caption=Text(f"in all jobs: {' '.join(sorted(common))}" if common else ""))
    table.caption_justify = "left"
    rows = [replace(row, overrides=tuple(text for text in row.overrides if text not in common)) for row in rows]
    for name in shown:
        table.add_column(
            name.removesuffix("_bytes").replace("_", " "), justify="left" if name in SHOWN[1:3] else "right"
        )
    table.add_column("best in loss against")
    for row in rows:
        cells = [Text(_words(name, COLUMNS[name](row))) for name in shown]
        table.add_row(*cells, " and ".join(name for name, front in fronts.items() if row.number in front))
    Console().print(table)


def _words(name: str, value: Any) -> str:
    if value is None:
        return ""
    return WORDS.get(name, str)(value)


def write_csv(rows: Sequence[Row], target: str) -> None:
    """Write all columns and all metrics; ``-`` is standard output.

    Raises:
        PresetError: the file can't be written.
    """
    metrics = sorted({name for row in rows for name in row.metrics})
    lines: list[list[Any]] = [[*COLUMNS, *metrics]]
    lines += [[*(ask(row) for ask in COLUMNS.values()), *(row.metrics.get(name) for name in metrics)] for row in rows]
    if target == "-":
        csv.writer(sys.stdout).writerows(lines)
        return
    try:
        with Path(target).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    except OSError as error:
        raise PresetError(f"--csv {target}: can't be written: {error.strerror}") from error
