"""`lightning-solo results [RUN]`: a sweep's jobs as a table or CSV, and why some failed; without RUN, the sweeps."""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError, nearest
from lightning_solo.report.sweep_folder import common_overrides, fronts_of, own_overrides, pruned
from lightning_solo.sweeps.files import RESULTS, STATE, SweepFolder
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.output import FILE
from lightning_solo.sweeps.results import Row, read_all
from lightning_solo.units import format_bytes, format_duration, shorter_numbers

DEPTH = 3
"""How many folders deep sweeps are looked for."""
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
    "seconds": format_duration,
}
SHOWN = ("job", "overrides", "status", "loss", "peak_device_bytes", "peak_host_bytes", "tokens_per_s", "seconds")


def run(arguments: Sequence[str]) -> int:
    """Print the rows of a sweep, or write them as CSV; exit 1 where a job did not finish. Without one, list sweeps."""
    options = _parser().parse_args(arguments)
    if options.run is None:
        sweeps = sweeps_below(Path())
        if arguments or not sweeps:
            raise NothingToDoError(f"results {' '.join(arguments)}: no sweep is named; {_offered(sweeps)}")
        print_sweeps(sweeps)
        return 0
    rows, column = rows_of(options.run), options.sort
    if column not in COLUMNS:
        raise PresetError(f"--sort {column}: no such column{nearest(column, COLUMNS)}one of {', '.join(COLUMNS)}")
    rows = sorted(rows, key=lambda row: _order(COLUMNS[column](row)), reverse=options.descending)
    if options.csv is not None:
        write_csv(rows, options.csv)
    else:
        print_rows(rows)
    return int(any(row.status != FINISHED for row in rows))


def _parser() -> argparse.ArgumentParser:
    status = "The exit status is 1 where a job did not finish."
    description = f"{(__doc__ or '').splitlines()[0]} {status}"
    parser = argparse.ArgumentParser(prog="lightning-solo results", description=description)
    parser.add_argument("run", nargs="?", type=Path, help="the sweep's folder, such as runs/first; without it, a list")
    parser.add_argument("--sort", default="job", metavar="COLUMN", help=f"one of {', '.join(COLUMNS)}")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument("--csv", metavar="FILE", help="write them there, - for standard output, with all metrics")
    return parser


def rows_of(folder: Path) -> list[Row]:
    """Return the rows of a sweep's folder.

    Raises:
        NothingToDoError: there are none; lists the sweeps in this folder.
        CheckpointError: they are of another version.
    """
    rows = read_all(SweepFolder(folder))
    if not rows:
        sweeps = sweeps_below(folder if folder.is_dir() else folder.parent)
        raise NothingToDoError(f"{folder}: no results of a sweep there; {_offered(sweeps)}")
    return rows


def sweeps_below(folder: Path) -> list[Path]:
    """Return the folders of sweeps with jobs in a folder, such as `multirun/train-1a2b3c4d`, the last run first."""
    depths = ("*/" * depth for depth in range(DEPTH + 1))
    found = {path.parent for depth in depths for name in (STATE, RESULTS) for path in folder.glob(depth + name)}
    return sorted(filter(_jobs_of, found), key=_last_run, reverse=True)


def _jobs_of(sweep: Path) -> str:
    """Return how many jobs of a sweep ended how; empty where there are none."""
    try:
        counts = Counter(row.status for row in read_all(SweepFolder(sweep)))
    except CheckpointError:
        return "of another version of lightning-solo"
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:  # a file of someone else's, or damaged
        return f"can't be read: {error}"
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _last_run(sweep: Path) -> float:
    return max(path.stat().st_mtime for path in (sweep, sweep / STATE, sweep / RESULTS) if path.exists())


def _offered(sweeps: Sequence[Path]) -> str:
    there = ", ".join(map(str, sweeps))
    return f"there are {there}" if sweeps else "lightning-solo train -m ... run=x makes runs/x"


def print_sweeps(sweeps: Sequence[Path]) -> None:
    """Print a table of sweeps: when each ran last, and how its jobs ended."""
    table = Table(box=None, pad_edge=False)
    for name in ("sweep", "last run", "jobs"):
        table.add_column(name, overflow="fold")
    for sweep in sweeps:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(_last_run(sweep)))
        table.add_row(Text(str(sweep)), when, _jobs_of(sweep))
    Console().print(table)


def _order(value: Any) -> tuple[bool, Any]:
    return value is None or value != value, value  # unknown values come last


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of jobs, which marks those on a Pareto front of loss, and why jobs failed.

    Overrides that do not fit beside the figures are listed below.
    """
    common = common_overrides(rows)
    console, names = Console(), {row.number: shorter_numbers(" ".join(own_overrides(row, common))) for row in rows}
    figures = table_of(rows, {})
    longest = max((len(word) for name in names.values() for word in name.split()), default=0)
    fits = console.measure(figures).maximum + longest + 2 <= console.width  # 2 of padding
    console.print(table_of(rows, names) if fits else figures)
    if not fits:
        console.print(*(Text(f"#{number} {name}") for number, name in names.items() if name), sep="\n")
    if common:
        console.print(Text(f"in all jobs: {' '.join(common)}", style="italic"))
    for row in rows:
        if row.status != FINISHED and row.detail:
            console.print(Text(f"#{row.number} {row.detail} ({Path(row.folder, FILE)})"), soft_wrap=True)


def table_of(rows: Sequence[Row], names: Mapping[int, str]) -> Table:
    """Return a row per job, with its name where it has one."""
    fronts = fronts_of(rows)
    shown = [name for name in SHOWN if any(COLUMNS[name](row) is not None for row in rows)]
    if not any(names.values()):
        shown.remove("overrides")
    table = Table(box=None, pad_edge=False)
    for name in shown:
        heading = name.removesuffix("_bytes").replace("_", " ")
        table.add_column(
            heading, justify="left" if name in SHOWN[1:3] else "right", no_wrap=bool(names) and name != "overrides"
        )
    table.add_column("best in loss against")
    for row in rows:
        own = {"overrides": names.get(row.number, ""), **({"status": row.detail} if pruned(row) else {})}
        cells = [Text(own[name] if name in own else _words(name, COLUMNS[name](row))) for name in shown]
        table.add_row(*cells, " and ".join(fronts[row.number]))
    return table


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
    lines += [
        [*(value(row) for value in COLUMNS.values()), *(row.metrics.get(name) for name in metrics)] for row in rows
    ]
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
