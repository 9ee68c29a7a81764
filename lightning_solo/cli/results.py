"""`lightning-solo results [RUN]`: prints a sweep's jobs as a table or CSV; without RUN, lists the sweeps."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError, nearest
from lightning_solo.report.sweep_folder import columns, common_overrides
from lightning_solo.sweeps.files import OUTPUT, RESULTS, STATE, SweepFolder
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.results import Row, read_all
from lightning_solo.tables import Cell, Column, csv_row, filled_table, terminal

DEPTH = 3
"""Depth of folders in which sweeps are searched."""
SHOWN = (
    "job",
    "overrides",
    "status",
    "loss",
    "peak_device_bytes",
    "peak_host_bytes",
    "tokens_per_s",
    "seconds",
    "gpu",
    "best",
)
COLUMNS = [name for name in columns([]) if name != "best"]
"""Columns for `--sort` and CSV."""


def run(arguments: Sequence[str]) -> int:
    """Print a sweep or write it as CSV, or list the sweeps; return 1 if a job did not finish."""
    options = _parser().parse_args(arguments)
    if options.run is None:
        sweeps = sweeps_below(Path())
        if arguments or not sweeps:
            raise NothingToDoError(f"results {' '.join(arguments)}: name a sweep; {_offered(sweeps)}")
        print_sweeps(sweeps)
        return 0
    rows, column = rows_of(options.run), options.sort
    if column not in COLUMNS:
        raise PresetError(f"--sort {column}: no such column{nearest(column, COLUMNS)}one of {', '.join(COLUMNS)}")
    cell = columns(rows)[column].cell
    rows = sorted(rows, key=lambda row: (cell(row).value is None, cell(row).value), reverse=options.descending)
    if options.csv is not None:
        write_csv(rows, options.csv)
    else:
        print_rows(rows)
    return int(any(row.status != FINISHED for row in rows))


def _parser() -> argparse.ArgumentParser:
    status = "The exit status is 1 if a job did not finish."
    description = f"{(__doc__ or '').splitlines()[0]} {status}"
    parser = argparse.ArgumentParser(prog="lightning-solo results", description=description)
    parser.add_argument("run", nargs="?", type=Path, help="the sweep's folder, such as runs/first; without it, a list")
    parser.add_argument("--sort", default="job", metavar="COLUMN", help=f"one of {', '.join(COLUMNS)}")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument("--csv", metavar="FILE", help="write the jobs with all metrics to FILE; - is standard output")
    return parser


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of a sweep's folder.

    Raises:
        NothingToDoError: no rows; lists the sweeps near the folder.
        CheckpointError: the rows are of another version.
    """
    rows = read_all(SweepFolder(folder))
    if not rows:
        sweeps = sweeps_below(folder if folder.is_dir() else folder.parent)
        raise NothingToDoError(f"{folder} has no results of a sweep; {_offered(sweeps)}")
    return rows


def sweeps_below(folder: Path) -> list[Path]:
    """Return the folders of sweeps below a folder, such as `multirun/train-1a2b3c4d`, the latest first."""
    depths = ("*/" * depth for depth in range(DEPTH + 1))
    found = {path.parent for depth in depths for name in (STATE, RESULTS) for path in folder.glob(depth + name)}
    return sorted(filter(_jobs_of, found), key=_last_run, reverse=True)


def _jobs_of(sweep: Path) -> str:
    """Return the number of a sweep's jobs by status, in words; empty if there are none."""
    try:
        counts = Counter(row.status for row in read_all(SweepFolder(sweep)))
    except CheckpointError:
        return "of another version of lightning-solo"
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:  # a foreign or damaged file
        return f"can't be read: {error}"
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _last_run(sweep: Path) -> float:
    return max(path.stat().st_mtime for path in (sweep, sweep / STATE, sweep / RESULTS) if path.exists())


def _offered(sweeps: Sequence[Path]) -> str:
    there = ", ".join(map(str, sweeps))
    return f"there are {there}" if sweeps else "lightning-solo train -m ... run=x writes runs/x"


def print_sweeps(sweeps: Sequence[Path]) -> None:
    """Print a table of sweeps with their last run and the status of their jobs."""

    def when(sweep: Path) -> Cell:
        return Cell(time.strftime("%Y-%m-%d %H:%M", time.localtime(_last_run(sweep))))

    shown = [Column("sweep", lambda path: Cell(str(path))), Column("last run", when)]
    Console().print(terminal(filled_table("", [*shown, Column("jobs", lambda path: Cell(_jobs_of(path)))], sweeps)))


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of jobs, with marks on the Pareto fronts of loss, and the errors of failed jobs.

    Overrides that don't fit into the table are listed below it.
    """
    console, common, shown = Console(), common_overrides(rows), columns(rows)
    names = [shown["overrides"].cell(row).text for row in rows]
    figures = terminal(filled_table("", [shown[name] for name in SHOWN if name != "overrides"], rows))
    longest = max((len(word) for name in names for word in name.split()), default=0)
    fits = console.measure(figures).maximum + longest + 2 <= console.width  # 2 of padding
    whole = terminal(filled_table("", [shown[name] for name in SHOWN], rows), wrapped=("overrides",))
    console.print(whole if fits else figures)
    if not fits:
        named = [f"#{row.number} {name}" for row, name in zip(rows, names, strict=True) if name]
        console.print(*map(Text, named), sep="\n")
    if common:
        console.print(Text(f"in all jobs: {' '.join(common)}", style="italic"))
    for row in rows:
        if row.status != FINISHED and row.detail:
            console.print(Text(f"#{row.number} {row.detail} ({Path(row.folder, OUTPUT)})"), soft_wrap=True)


def write_csv(rows: Sequence[Row], target: str) -> None:
    """Write all columns and metrics as CSV; ``-`` is standard output.

    Raises:
        PresetError: the file can't be written.
    """
    metrics = sorted({name for row in rows for name in row.metrics})
    cells = [columns(rows)[name].cell for name in COLUMNS]
    lines: list[list[Any]] = [[*COLUMNS, *metrics]]
    lines += [[*csv_row(cell(row) for cell in cells), *(row.metrics.get(name) for name in metrics)] for row in rows]
    if target == "-":
        try:
            csv.writer(sys.stdout).writerows(lines)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has read enough; the rest of Python's buffer is discarded
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        with Path(target).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    except OSError as error:
        raise PresetError(f"--csv {target}: can't be written: {error.strerror}") from error
